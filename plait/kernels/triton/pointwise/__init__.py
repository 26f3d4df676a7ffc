"""Norms, activations, moves of rows."""
