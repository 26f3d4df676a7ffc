"""Writing GGUF: metadata, vocabulary, file."""
