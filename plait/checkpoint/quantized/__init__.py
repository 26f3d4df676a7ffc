"""Quantized checkpoints of safetensors: GPTQ, AWQ, compressed-tensors, FP8, FP4, bitsandbytes."""
