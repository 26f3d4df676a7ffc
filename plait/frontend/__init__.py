"""Requests and replies outside the engine. Loads no torch."""
