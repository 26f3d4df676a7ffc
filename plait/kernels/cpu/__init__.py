"""Native CPU kernels, compiled by LLVM through Numba."""
