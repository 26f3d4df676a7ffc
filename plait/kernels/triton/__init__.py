"""Kernels for GPUs in Triton. Imported only where that is installed: `kernels.load`."""
