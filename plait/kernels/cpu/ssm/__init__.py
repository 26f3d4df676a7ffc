"""State-space scans, delta rule, RG-LRU, short convolution."""
