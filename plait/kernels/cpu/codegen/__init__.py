"""How kernels are compiled: target, LLVM instructions, vectors, the cache of compiled kernels."""
