"""Trials of GPU kernels at the first startup on a GPU: no kernel is bound there that was not right there."""
