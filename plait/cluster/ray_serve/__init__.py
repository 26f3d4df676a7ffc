"""The cluster on Ray Serve: the only modules that import Ray. `plait serve` imports none of them."""
