"""Tiny Mistral, Ministral 3, Mixtral and Mistral 4 of transformers, and the same as Mistral's own files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.text import tekken_files

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE = 97, 32, 4, 2, 8
SHARED: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, rms_norm_eps=1e-5)
PLAIN: dict[str, Any] = dict(
    **SHARED,
    intermediate_size=48,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
    max_position_embeddings=256,
)
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GROWING = {**YARN, "attention_factor": 1.0, "llama_4_scaling_beta": 0.1}
OWN: dict[str, Any] = dict(
    dim=HIDDEN, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=SIZE, hidden_dim=48,
    norm_eps=1e-5, vocab_size=VOCAB, rope_theta=1e6, max_position_embeddings=256,
)  # fmt: skip
OWN_YARN: dict[str, Any] = {
    "yarn": {
        "factor": 4,
        "original_max_position_embeddings": 16,
        "beta": 32,
        "alpha": 1,
        "apply_scale": False,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
}

# The name that transformers gives to a model -> (its config, what params.json says of the same).
MODELS: Mapping[str, tuple[transformers.PreTrainedConfig, dict[str, Any]]] = {
    "mistral": (transformers.MistralConfig(**PLAIN, rope_theta=1e6, sliding_window=None), OWN),
    "ministral3": (
        transformers.Ministral3Config(**PLAIN, rope_parameters=GROWING),
        {**OWN, **OWN_YARN, "vision_encoder": {"hidden_size": 8}},
    ),
    "mixtral": (
        transformers.MixtralConfig(**PLAIN, rope_theta=1e6, num_local_experts=4, num_experts_per_tok=2),
        {**OWN, "moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "mistral4": (
        transformers.Mistral4Config(
            **SHARED,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            max_position_embeddings=256,
            rope_parameters={**GROWING, "partial_rotary_factor": 0.5},
        ),
        {
            **{key: value for key, value in OWN.items() if key != "head_dim"},
            **OWN_YARN,
            **dict(n_kv_heads=HEADS, kv_lora_rank=16, q_lora_rank=16, v_head_dim=8),
            **dict(qk_rope_head_dim=4, qk_nope_head_dim=4),
            "moe": dict(
                num_experts=4, num_experts_per_tok=2, expert_hidden_dim=16, first_k_dense_replace=1,
                num_shared_experts=1, routed_scale=1.0, route_every_n=1, num_expert_groups=1,
                num_expert_groups_per_tok=1,
            ),
        },
    ),
}  # fmt: skip
_MLP = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_NAMES = (
    (r"^model\.", ""),
    (r"^lm_head", "output"),
    (r"^embed_tokens", "tok_embeddings"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
    (r"self_attn\.(\w+)_a_layernorm", r"attention.\1_a_norm"),
    (r"self_attn\.(\w+)_proj", r"attention.w\1"),
    (r"block_sparse_moe", "feed_forward"),
    (r"mlp\.(gate\.|experts|shared_experts)", r"\1"),
    (r"mlp\.", "feed_forward."),
)


def to_own(name: str) -> str:
    """Mistral's name of a tensor of transformers."""
    for pattern, own in _NAMES:
        name = re.sub(pattern, own, name)
    return re.sub("|".join(_MLP), lambda match: _MLP[match[0]], name)


def list_experts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of single experts of a stack; others as they are."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, value
        return
    start, _, kind = name.rpartition(".")
    for number, one in enumerate(value):
        parts = one.chunk(2) if kind == "gate_up_proj" else (one,)
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        yield from ((f"{start}.{number}.{k}.weight", part) for k, part in zip(kinds, parts, strict=True))


def to_pairs(name: str, value: Tensor) -> Tensor:
    """Rows of queries and keys as Mistral has them: numbers of a pair next to each other."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None or value.numel() == 1:
        return value
    return value.view(heads, 2, SIZE // 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def write_both(name: str, folder: Path) -> tuple[Path, Path]:
    """A random model in transformers' files, and in Mistral's own."""
    torch.manual_seed(0)
    config, params = MODELS[name]
    model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.2 + ("norm" in key))
    model.save_pretrained(folder / "hf")
    write_own(folder / "own", load_file(folder / "hf/model.safetensors"), params)
    return folder / "hf", folder / "own"


def write_chat_model(folder: Path, tekken: dict[str, Any]) -> None:
    """A tiny Mistral in its own files, with a vocabulary."""
    size = tekken["config"]["default_vocab_size"]
    torch.manual_seed(0)
    config = transformers.MistralConfig(**{**PLAIN, "vocab_size": size}, rope_theta=1e6, sliding_window=None)
    write_own(folder, transformers.MistralForCausalLM(config).state_dict(), {**OWN, "vocab_size": size})
    tekken_files.write(folder, tekken)


def write_own(folder: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> None:
    """Tensors of transformers in Mistral's files, with what sees next to them."""
    folder.mkdir(parents=True, exist_ok=True)
    single = {name: value for given in tensors.items() for name, value in list_experts(*given)}
    turned = {to_own(name): to_pairs(name, value).contiguous() for name, value in single.items()}
    if "vision_encoder" in params:
        turned["vision_encoder.ln_pre.weight"] = torch.zeros(4)
        turned["vision_language_adapter.w_in.weight"] = torch.zeros(4, 4)
    save_file(turned, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(params))
