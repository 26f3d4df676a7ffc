"""Kernels on AMX tiles."""
