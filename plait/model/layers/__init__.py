"""Parts of every decoder: embedding, MLP, MoE, norms, rotary positions."""
