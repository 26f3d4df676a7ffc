"""What a model is, as plain data: its layers, and the kinds of mixers in them."""
