"""Adapters (LoRA): into the slots of a model that runs, and merged into the tensors of a checkpoint."""
