"""A recorded step over host memory, and the tokens from its logits. Nothing here loads torch."""
