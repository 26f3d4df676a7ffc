"""Ollama's API: its endpoints over the same chat, completion and embeddings as the others."""
