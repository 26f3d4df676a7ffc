"""Token mixers: one module per kind."""
