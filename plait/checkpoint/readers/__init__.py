"""File formats: safetensors and GGUF, checked before they are mapped."""
