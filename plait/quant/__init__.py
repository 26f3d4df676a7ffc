"""Storage formats of weights, each a type: a linear map that knows its shape and how to become numbers."""
