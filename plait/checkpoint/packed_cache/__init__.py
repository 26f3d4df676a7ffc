"""The packed-weight cache: weights as kernels read them, kept so that the next startup maps them."""
