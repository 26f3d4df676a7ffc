"""How kernels run: threads, recorded steps, memory of tiles."""
