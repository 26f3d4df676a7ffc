"""A config inferred from tensor names and shapes, where a checkpoint has none."""
