"""Mixture of experts, and per-head products."""
