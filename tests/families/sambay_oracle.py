"""SambaY, written down plainly from its paper: the oracle for a model that transformers lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["Phi4FlashForCausalLM"],
    "model_type": "phi4flash",
    "vocab_size": 97,
    "hidden_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "sliding_window": 6,
    "mb_per_layer": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 3,
    "mamba_expand": 2,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def checkpoint(c: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the names of the published model, in double precision."""
    torch.manual_seed(2)
    n, count, made = c["hidden_size"], c["num_hidden_layers"], dict[str, Tensor]()
    inner, dim, state = c["mamba_expand"] * n, n // c["num_attention_heads"], c["mamba_d_state"]

    def put(name: str, *shape: int) -> None:
        made[name] = torch.randn(shape, dtype=torch.float64) * 0.3

    def linear(name: str, outs: int, ins: int, bias: bool = False) -> None:
        put(f"{name}.weight", outs, ins)
        if bias:
            put(f"{name}.bias", outs)

    put("model.embed_tokens.weight", c["vocab_size"], n)
    for name in ("weight", "bias"):
        put(f"model.final_layernorm.{name}", n)
    for i in range(count):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"{layer}.{norm}.weight", n)
            put(f"{layer}.{norm}.bias", n)
        linear(f"{layer}.mlp.fc1", 2 * c["intermediate_size"], n)
        linear(f"{layer}.mlp.fc2", n, c["intermediate_size"])
        if i % 2:
            keys = 0 if i > count // 2 + 1 else 2 * c["num_key_value_heads"] * dim
            linear(f"{layer}.attn.Wqkv", n + keys, n, bias=True)
            linear(f"{layer}.attn.out_proj", n, n, bias=True)
            for x in ("q1", "k1", "q2", "k2"):
                put(f"{layer}.attn.inner_cross_attn.lambda_{x}", dim)
            put(f"{layer}.attn.inner_cross_attn.subln.weight", 2 * dim)
            continue
        linear(f"{layer}.attn.in_proj", inner if i > count // 2 else 2 * inner, n)
        linear(f"{layer}.attn.out_proj", n, inner)
        if i <= count // 2:
            put(f"{layer}.attn.conv1d.weight", inner, 1, c["mamba_d_conv"])
            put(f"{layer}.attn.conv1d.bias", inner)
            linear(f"{layer}.attn.x_proj", c["mamba_dt_rank"] + 2 * state, inner)
            linear(f"{layer}.attn.dt_proj", inner, c["mamba_dt_rank"], bias=True)
            put(f"{layer}.attn.A_log", inner, state)
            put(f"{layer}.attn.D", inner)
    return made


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q: [T, heads, d], k: [T, groups, d], v: [T, groups, e] -> [T, heads, e]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (behind < 0) | (behind >= (window or len(q)))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hnm,mhe->nhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def difference(
    c: dict[str, Any], t: dict[str, Tensor], i: int, x: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(what attention gives, its keys and values: those of an earlier layer if they are `kept`)."""
    at, n, middle = f"model.layers.{i}.attn", c["hidden_size"], c["num_hidden_layers"] // 2
    dim = n // c["num_attention_heads"]
    fused = x @ t[f"{at}.Wqkv.weight"].T + t[f"{at}.Wqkv.bias"]
    if kept is None:
        kept = fused[:, n:]
    q = fused[:, :n].unflatten(-1, (-1, 2, dim))  # pairs of heads side by side
    k, v = (half.unflatten(-1, (-1, 2, dim)) for half in kept.chunk(2, -1))
    window = c["sliding_window"] if i < middle else None
    one, two = (attend(q[:, :, h], k[:, :, h], v.flatten(2), window) for h in (0, 1))
    inner = f"{at}.inner_cross_attn"
    first, second = ((t[f"{inner}.lambda_q{h}"] @ t[f"{inner}.lambda_k{h}"]).exp() for h in (1, 2))
    base = 0.8 - 0.6 * math.exp(-0.3 * i)
    y = one - (first - second + base) * two
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * t[f"{inner}.subln.weight"]
    return (y * (1 - base)).flatten(1) @ t[f"{at}.out_proj.weight"].T + t[f"{at}.out_proj.bias"], kept


def scan(c: dict[str, Any], t: dict[str, Tensor], i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """(what Mamba1 gives, the same before gate and last layer)."""
    at, state = f"model.layers.{i}.attn", c["mamba_d_state"]
    u, gate = (x @ t[f"{at}.in_proj.weight"].T).chunk(2, -1)
    padded = F.pad(u, (0, 0, c["mamba_d_conv"] - 1, 0))
    taps = t[f"{at}.conv1d.weight"][:, 0]
    u = F.silu(torch.einsum("tck,ck->tc", padded.unfold(0, taps.shape[1], 1), taps) + t[f"{at}.conv1d.bias"])
    step, B, C = (u @ t[f"{at}.x_proj.weight"].T).split([c["mamba_dt_rank"], state, state], -1)
    step = F.softplus(step @ t[f"{at}.dt_proj.weight"].T + t[f"{at}.dt_proj.bias"])
    A, h, rows = -t[f"{at}.A_log"].exp(), torch.zeros(u.shape[1], state, dtype=u.dtype), []
    for now in range(len(u)):
        h = (step[now, :, None] * A).exp() * h + (step[now] * u[now])[:, None] * B[now]
        rows.append(h @ C[now] + t[f"{at}.D"] * u[now])
    y = torch.stack(rows)
    return (y * F.silu(gate)) @ t[f"{at}.out_proj.weight"].T, y


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    x, middle = t["model.embed_tokens.weight"][ids], c["num_hidden_layers"] // 2
    memory, kept = x, x

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], c["layer_norm_eps"])

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        if i % 2:
            h, found = difference(c, t, i, h, kept if i > middle + 1 else None)
            kept = found if i == middle + 1 else kept
        elif i > middle:
            gate = F.silu(h @ t[f"{layer}.attn.in_proj.weight"].T)
            h = (gate * memory) @ t[f"{layer}.attn.out_proj.weight"].T
        else:
            h, memory = scan(c, t, i, h)
        x = x + h
        gate, up = (norm(x, f"{layer}.post_attention_layernorm") @ t[f"{layer}.mlp.fc1.weight"].T).chunk(
            2, -1
        )
        x = x + (F.silu(gate) * up) @ t[f"{layer}.mlp.fc2.weight"].T
    return norm(x, "model.final_layernorm") @ t["model.embed_tokens.weight"].T
