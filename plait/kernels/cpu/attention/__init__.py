"""Attention over paged caches, MLA, rotary positions."""
