"""Configs of every dialect as one, and the checks on them."""
