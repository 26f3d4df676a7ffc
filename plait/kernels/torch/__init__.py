"""Variants made of torch's own fused operators, for every device that torch knows."""
