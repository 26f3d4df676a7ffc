"""Activations, norms, gates, copies, sampling."""
