"""The models that a server has: one, or several that are loaded when a request names them."""
