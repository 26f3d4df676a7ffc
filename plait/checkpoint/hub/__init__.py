"""Models on the Hub and at other web addresses: names, cache, download."""
