"""A checkpoint becomes another: GGUF or safetensors, in another storage, one tensor at a time."""
