"""Hymba, written down plainly from its paper and config: the oracle for a model that transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["HymbaForCausalLM"],
    "model_type": "hymba",
    "vocab_size": 97,
    "hidden_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
    "orig_max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 6,
    "global_attn_idx": [0, 4],
    "kv_reuse_group": [[1, 2, 3]],
    "num_memory_tokens": 9,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 3,
    "mamba_expand": 2,
    "rope_type": "ntk",
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}


def checkpoint(c: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the names of the published models, in double precision."""
    torch.manual_seed(3)
    n, inner, state, made = c["hidden_size"], 2 * c["hidden_size"], c["mamba_d_state"], dict[str, Tensor]()
    keys = c["num_key_value_heads"] * (n + inner) // c["num_attention_heads"]
    readers = {i for group in c["kv_reuse_group"] for i in group[1:]}

    def put(name: str, *shape: int) -> None:
        made[name] = torch.randn(shape, dtype=torch.float64) * 0.3

    put("model.embed_tokens.weight", c["vocab_size"], n)
    if c["num_memory_tokens"]:
        put("model.memory_tokens", c["num_memory_tokens"], n)
    put("model.final_layernorm.weight", n)
    for i in range(c["num_hidden_layers"]):
        layer, at = f"model.layers.{i}", f"model.layers.{i}.mamba"
        for name in ("input_layernorm", "pre_moe_layernorm"):
            put(f"{layer}.{name}.weight", n)
        for name, rows, cols in (("gate", c["intermediate_size"], n), ("up", c["intermediate_size"], n)):
            put(f"{layer}.moe.experts.0.{name}_proj.weight", rows, cols)
        put(f"{layer}.moe.experts.0.down_proj.weight", n, c["intermediate_size"])
        put(f"{at}.in_proj.weight", n + 2 * inner + (0 if i in readers else keys), n)
        put(f"{at}.out_proj.weight", n, inner)
        put(f"{at}.conv1d.weight", inner, 1, c["mamba_d_conv"])
        put(f"{at}.conv1d.bias", inner)
        put(f"{at}.x_proj.0.weight", c["mamba_dt_rank"] + 2 * state, inner)
        put(f"{at}.dt_proj.0.weight", inner, c["mamba_dt_rank"])
        put(f"{at}.dt_proj.0.bias", inner)
        put(f"{at}.A_log.0", inner, state)
        put(f"{at}.D.0", inner)
        for name, size in (
            ("dt_layernorm", c["mamba_dt_rank"]),
            ("B_layernorm", state),
            ("C_layernorm", state),
        ):
            put(f"{at}.{name}.weight", size)
        for number in (1, 2):
            put(f"{at}.pre_avg_layernorm{number}.weight", inner)
    return made


def turned(x: Tensor, base: float) -> Tensor:
    """x: [T, heads, d], with rotary positions from 0 on."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * freq
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def scan(c: dict[str, Any], t: dict[str, Tensor], at: str, u: Tensor, gate: Tensor) -> Tensor:
    state, eps = c["mamba_d_state"], c["rms_norm_eps"]
    taps = t[f"{at}.conv1d.weight"][:, 0]
    padded = F.pad(u, (0, 0, c["mamba_d_conv"] - 1, 0)).unfold(0, taps.shape[1], 1)
    u = F.silu(torch.einsum("tck,ck->tc", padded, taps) + t[f"{at}.conv1d.bias"])
    parts = (u @ t[f"{at}.x_proj.0.weight"].T).split([c["mamba_dt_rank"], state, state], -1)
    step, B, C = (
        F.rms_norm(part, part.shape[-1:], t[f"{at}.{name}_layernorm.weight"], eps)
        for part, name in zip(parts, ("dt", "B", "C"), strict=True)
    )
    step = F.softplus(step @ t[f"{at}.dt_proj.0.weight"].T + t[f"{at}.dt_proj.0.bias"])
    A, h, rows = -t[f"{at}.A_log.0"].exp(), torch.zeros(u.shape[1], state, dtype=u.dtype), []
    for now in range(len(u)):
        h = (step[now, :, None] * A).exp() * h + (step[now] * u[now])[:, None] * B[now]
        rows.append(h @ C[now] + t[f"{at}.D.0"] * u[now])
    return torch.stack(rows) * F.silu(gate)


def attend(c: dict[str, Any], i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Learned tokens are seen from everywhere."""
    at, front = torch.arange(len(q)), c["num_memory_tokens"]
    behind = at[:, None] - at
    is_seen = behind >= 0
    if i not in c["global_attn_idx"]:
        is_seen &= (behind <= c["sliding_window"]) | (at < front)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hnm,mhe->nhe", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v).flatten(1)


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    n, heads, groups, eps = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["rms_norm_eps"],
    )
    dim, kept = n // heads, dict[int, tuple[Tensor, Tensor]]()
    base = c["rope_theta"]
    if c["rope_type"] == "ntk":
        ratio = c["max_position_embeddings"] / c["orig_max_position_embeddings"]
        base *= (2 * ratio - 1) ** (dim / (dim - 2))
    source = {i: group[0] for group in c["kv_reuse_group"] for i in group}
    x = t["model.embed_tokens.weight"][ids]
    if c["num_memory_tokens"]:
        x = torch.cat([t["model.memory_tokens"], x])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], t[f"{name}.weight"], eps)

    for i in range(c["num_hidden_layers"]):
        layer, at = f"model.layers.{i}", f"model.layers.{i}.mamba"
        rows = norm(x, f"{layer}.input_layernorm") @ t[f"{at}.in_proj.weight"].T
        q, rest = rows[:, :n], rows[:, n:]
        if source.get(i, i) == i:
            k, v, rest = rest.split([groups * dim, 2 * groups * dim, 4 * n], -1)
            kept[i] = (turned(k.unflatten(-1, (groups, -1)), base), v.unflatten(-1, (groups, -1)))
        u, gate = rest.chunk(2, -1)
        a = attend(c, i, turned(q.unflatten(-1, (heads, -1)), base), *kept[source.get(i, i)])
        both = norm(a, f"{at}.pre_avg_layernorm1") + norm(scan(c, t, at, u, gate), f"{at}.pre_avg_layernorm2")
        x = x + both / 2 @ t[f"{at}.out_proj.weight"].T
        h, ffn = norm(x, f"{layer}.pre_moe_layernorm"), f"{layer}.moe.experts.0"
        gate, up = (h @ t[f"{ffn}.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ t[f"{ffn}.down_proj.weight"].T
    return norm(x[c["num_memory_tokens"] :], "model.final_layernorm") @ t["model.embed_tokens.weight"].T
