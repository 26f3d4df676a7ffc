"""Every request before and after its endpoint: keys, limits, logs, metrics."""
