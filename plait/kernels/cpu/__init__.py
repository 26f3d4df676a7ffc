"""Kernels for CPUs in Numba, on LLVM vectors: native speed without a compiler."""
