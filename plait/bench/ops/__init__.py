"""`plait bench op`: every op alone, with the share of memory bandwidth and compute that it reaches."""
