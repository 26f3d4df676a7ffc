"""Benchmarks: a model, its ops, a server; each checked before it is counted."""
