"""The engine: requests in, events out, one step at a time."""
