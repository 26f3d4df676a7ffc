"""What a probe finds out about a model without a config, and where it is kept."""
