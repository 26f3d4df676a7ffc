"""Triton kernels of attention over compressed entries, and over learned keys in front."""
