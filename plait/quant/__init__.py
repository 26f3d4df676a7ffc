"""Storage formats of weights, each a type: a weight matrix that knows its shape and how to become numbers."""
