"""What the small models of `plait verify --certificate` share: their sizes.

Widths are odd on purpose: no size is a multiple of what kernels like, windows are shorter than the prompts,
and the vocabulary is small, so that other tokens are never far.
"""

from __future__ import annotations

from collections.abc import Mapping

Config = Mapping[str, object]
Shapes = Mapping[str, tuple[int, ...]]
HIDDEN, VOCAB, LONGEST, WINDOW = 32, 97, 4096, 24
SIZES: dict[str, object] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": LONGEST,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}


def make_config(architecture: str, kind: str, **changes: object) -> Config:
    """The config.json of a small model."""
    return {"architectures": [architecture], "model_type": kind, **SIZES, **changes}
