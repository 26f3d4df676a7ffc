"""Checkpoints of oxidizr: config, names, weights."""
