"""The router and the experts."""
