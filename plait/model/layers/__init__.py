"""Parts of every decoder: embedding, norms, rotary positions."""
