"""Model families: one module per family, each a function from a config to a spec."""
