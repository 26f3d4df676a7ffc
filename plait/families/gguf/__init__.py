"""GGUF architectures: metadata to config, tensor names to ours."""
