"""What families are written with: the registry, recipes of tensors, builders of specs."""
