"""Embedding lookups from every storage."""
