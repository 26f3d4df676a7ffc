"""PLaMo 3, written down plainly from its published description: the oracle for a model transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["Plamo3ForCausalLM"],
    "model_type": "plamo3",
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "window_size": 6,
    "sliding_window_pattern": 3,
    "rope_theta": 50_000,
    "rope_local_theta": 700,
    "tie_word_embeddings": False,
}
AROUND = {"pre_mixer": 1.0, "post_mixer": 1 / 5, "pre_mlp": 1.0, "post_mlp": 1 / 5**1.5}


def checkpoint(c: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the names of the published models, in double precision."""
    torch.manual_seed(1)
    n, rows, made = c["hidden_size"], c["head_dim"] * c["num_attention_heads"], dict[str, Tensor]()

    def put(name: str, *shape: int) -> None:
        made[f"{name}.weight"] = torch.randn(shape, dtype=torch.float64) * 0.2

    put("model.embed_tokens", c["vocab_size"], n)
    put("model.norm", n)
    put("lm_head", c["vocab_size"], n)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.layers.{i}"
        for name in AROUND:
            put(f"{layer}.{name}_norm", n)
        put(f"{layer}.mixer.qkv_proj", rows + 2 * c["head_dim"] * c["num_key_value_heads"], n)
        put(f"{layer}.mixer.o_proj", n, rows)
        put(f"{layer}.mixer.q_norm", c["head_dim"])
        put(f"{layer}.mixer.k_norm", c["head_dim"])
        put(f"{layer}.mlp.gate_up_proj", 2 * c["intermediate_size"], n)
        put(f"{layer}.mlp.down_proj", n, c["intermediate_size"])
    return made


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, base: float) -> Tensor:
    """x: [T, heads, d], with rotary positions from 0 on."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * freq
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["head_dim"]
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    at = torch.arange(len(ids))
    for i in range(c["num_hidden_layers"]):
        layer, is_full = f"model.layers.layers.{i}", (i + 1) % c["sliding_window_pattern"] == 0

        def norm(x: Tensor, name: str, layer: str = layer) -> Tensor:
            return rms(x, t[f"{layer}.{name}_norm.weight"] + AROUND[name], eps)

        qkv = (norm(x, "pre_mixer") @ t[f"{layer}.mixer.qkv_proj.weight"].T).unflatten(-1, (-1, dim))
        q, k, v = qkv.split([heads, groups, groups], 1)
        base = c["rope_theta"] if is_full else c["rope_local_theta"]
        q, k = (
            turned(rms(part, t[f"{layer}.mixer.{x}_norm.weight"] + 1, eps), base)
            for x, part in (("q", q), ("k", k))
        )
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * dim**-0.5
        behind = at[:, None] - at[None]
        hidden = (behind < 0) | (behind >= (len(ids) if is_full else c["window_size"]))
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        y = torch.einsum("hnm,mhd->nhd", probs, v).flatten(1) @ t[f"{layer}.mixer.o_proj.weight"].T
        x = x + norm(y, "post_mixer")
        gate, up = (norm(x, "pre_mlp") @ t[f"{layer}.mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + norm((F.silu(gate) * up) @ t[f"{layer}.mlp.down_proj.weight"].T, "post_mlp")
    return rms(x, t["model.norm.weight"] + 1, eps) @ t["lm_head.weight"].T
