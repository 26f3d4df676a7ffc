"""Attention over paged memory: heads are placed, then attended."""
