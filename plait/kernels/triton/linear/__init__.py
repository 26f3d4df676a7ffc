"""Linear layers of every storage, the embedding and a matrix per head."""
