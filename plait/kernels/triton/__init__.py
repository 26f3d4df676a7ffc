"""Kernels for GPUs in Triton. Imported only where that is installed: `kernels.load`.

Names that kernels share. In lower case: pointers and numbers of a launch; `x_row`, `x_head`: strides of x, in
numbers; `there`, `seen`, `ok`: masks. In capitals: constants, each value of which makes a kernel of its own.
`D`, `K`, `N` are sizes, and with a P behind (`DP`) the next power of two, as tiles must have; `BM`, `BN`,
`BK`, `BT`: sizes of a tile; `S`: sequences, `H` and `KVH`: heads and kv heads, `G`: query heads of a kv head.

A file has its kernels, then the variants that launch them, then `forms`: what tools compile without a GPU.
"""
