"""Checkpoints: files on disk or on the Hub, and the tensors in them."""
