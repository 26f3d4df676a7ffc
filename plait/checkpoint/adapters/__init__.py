"""Adapters (LoRA) in PEFT's layout and as GGUF: read, checked, and matched to a model's linear layers."""
