"""Faster variants of ops. Only `plait.kernels.load` imports them; each must agree with its reference."""
