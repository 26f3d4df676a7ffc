"""From logits to tokens, and what moves on between two steps."""
