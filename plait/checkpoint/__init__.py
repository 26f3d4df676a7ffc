"""Readers of model files, and the pull side: modules ask for tensors by our names."""
