"""Bytes of state of one sequence by its length, for models that are here and for published shapes.

What a mixer remembers follows from its spec alone. It is written down again here, so that a model's weights
are not needed, and compared with what the model itself says where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config import EngineConfig
from plait.engine.memory_plan import sequence_rows
from plait.families.common.registry import build_spec
from plait.loading.meta.meta_model import model_states
from plait.loading.open_model import kv_dtype, open_model, stored_dtypes
from plait.memory import PagedState, SlotState, State
from plait.spec.model import AttentionSpec, Mamba2Spec, MlaSpec, ModelSpec

LENGTHS = (512, 4096, 32768, 131072)
SSM = {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_expand": 2}
ATTENTION_AT = {5, 15, 25, 35}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Bamba-9B": {
        "architectures": ["BambaForCausalLM"],
        **dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256),
        **dict(num_attention_heads=32, num_key_value_heads=8, attn_layer_indices=[9, 18, 27]),
        **dict(mamba_n_heads=128, max_position_embeddings=262144, **SSM),
    },
    "Granite-4.0-H-Tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **dict(hidden_size=1536, num_hidden_layers=40, intermediate_size=512, vocab_size=100352),
        **dict(num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48, num_local_experts=64),
        **dict(num_experts_per_tok=6, shared_intermediate_size=1024, max_position_embeddings=131072, **SSM),
        **dict(layer_types=["attention" if i in ATTENTION_AT else "mamba" for i in range(40)]),
        **dict(position_embedding_type="nope", attention_multiplier=0.0078125),
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **dict(hidden_size=2048, num_hidden_layers=27, intermediate_size=10944, vocab_size=102400),
        **dict(num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None),
        **dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64),
        **dict(n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408),
        **dict(first_k_dense_replace=1, max_position_embeddings=163840, topk_method="greedy"),
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        **dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256),
        **dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072),
    },
}


def rows(models: Mapping[str, Path]) -> list[dict[str, Any]]:
    """One row per model: bytes for each length, and of a snapshot. Keys and values as they are kept."""
    found = []
    for name, path in models.items():
        opened = open_model(str(path), EngineConfig(device="cpu"))
        spec = opened.resolved.spec
        own = model_states(opened.resolved, opened.checkpoint)
        assert states_of(spec, "model") == dict(own), f"{name} remembers something else than its spec says"
        kept = kv_dtype(EngineConfig(), stored_dtypes(opened), _float32())
        found.append(_row(name, spec, kept))
    for name, config in PUBLISHED.items():
        found.append(_row(name, build_spec(config)[0], "bfloat16"))
    return found


def states_of(spec: ModelSpec, kept: str) -> dict[str, State]:
    """What every mixer remembers; keys, values and latents are `kept` in this dtype."""
    found: dict[str, State] = {}
    for name, mixer in spec.mixers():
        match mixer:
            case AttentionSpec():
                entry = (mixer.num_kv_heads, mixer.head_dim)
                found[name] = PagedState({"k": entry, "v": entry}, mixer.window, kept)
            case MlaSpec():
                found[name] = PagedState({"latent": (mixer.kv_rank + mixer.rope.dim,)}, dtype=kept)
            case Mamba2Spec():
                channels = mixer.num_heads * mixer.head_dim + 2 * mixer.num_groups * mixer.state_size
                ssm = (mixer.num_heads, mixer.head_dim, mixer.state_size)
                conv = (mixer.conv_kernel - 1, channels)
                found[name] = SlotState({"conv": (conv, "model"), "ssm": (ssm, "float32")})
    return found


def _row(name: str, spec: ModelSpec, kept: str) -> dict[str, Any]:
    states = states_of(spec, kept)
    mixers = [mixer for _, mixer in spec.mixers()]
    slot = sum(s.nbytes_per_slot("float32") for s in states.values() if isinstance(s, SlotState))
    token = sum(
        s.nbytes_per_token("float32")
        for s in states.values()
        if isinstance(s, PagedState) and s.window is None
    )
    table = dict(sequence_rows(states, "float32", 16, [n for n in LENGTHS if n <= spec.max_len]))
    return {
        "model": name,
        "attention": sum(isinstance(m, AttentionSpec) and m.window is None for m in mixers),
        "windowed": sum(isinstance(m, AttentionSpec) and m.window is not None for m in mixers),
        "mla": sum(isinstance(m, MlaSpec) for m in mixers),
        "mamba2": sum(isinstance(m, Mamba2Spec) for m in mixers),
        "kept as": kept if kept != "model" else "float32",
        "per token": token,
        "snapshot": slot,
        **{f"{n:,}": table.get(n) for n in LENGTHS},
    }


def _float32() -> Any:
    import torch

    return torch.float32
