"""PLaMo 2, written down plainly from its published description: the oracle for a model transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["Plamo2ForCausalLM"],
    "model_type": "plamo2",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_head": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "attention_window_size": 5,
    "sliding_window": 5,
    "full_attention_idx": [3],
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_num_heads": 6,
    "mamba_step": 2,
    "mamba_enabled": True,
    "tie_word_embeddings": True,
}
RANK = 64  # of the steps: a sixteenth of the hidden size, but at least this


def is_recurrent(c: dict[str, Any], i: int) -> bool:
    """Which layers do not attend."""
    return c["mamba_enabled"] and i % c["mamba_step"] != c["mamba_step"] // 2


def checkpoint(c: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """Random tensors under the names of published files."""
    g = torch.Generator().manual_seed(seed)
    hidden, dim, state = c["hidden_size"], c["hidden_size_per_head"], c["mamba_d_state"]
    heads, q, kv = c["mamba_num_heads"], c["num_attention_heads"], c["num_key_value_heads"]
    inner = heads * dim

    def some(*shape: int, scale: float = 0.2, center: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=g) * scale + center

    tensors = {
        "model.embed_tokens.weight": some(c["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": some(hidden),
    }
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.layers.{i}"
        for norm in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"):
            tensors[f"{at}.{norm}_norm.weight"] = some(hidden)
        tensors[f"{at}.mlp.gate_up_proj.weight"] = some(2 * c["intermediate_size"], hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = some(hidden, c["intermediate_size"])
        if is_recurrent(c, i):
            own = {
                "in_proj.weight": some(2 * inner, hidden),
                "conv1d.weight": some(inner, 1, c["mamba_d_conv"], scale=0.5),
                "bcdt_proj.weight": some(RANK + 2 * state, inner),
                "dt_proj.weight": some(heads, RANK),
                "dt_bias": some(heads),
                "A_log": some(heads, scale=0.5),
                "D": some(heads, center=1.0),
                "dt_norm_weight": some(RANK, center=1.0),
                "B_norm_weight": some(state, center=1.0),
                "C_norm_weight": some(state, center=1.0),
                "out_proj.weight": some(hidden, inner),
            }
        else:
            own = {
                "qkv_proj.weight": some((q + 2 * kv) * dim, hidden),
                "o_proj.weight": some(hidden, q * dim),
                "q_weight": some(q, dim, center=1.0),
                "k_weight": some(kv, dim, center=1.0),
            }
        tensors |= {f"{at}.mixer.{name}": tensor for name, tensor in own.items()}
    return tensors


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab], in float64, a token at a time where there is a state."""
    t = {name: tensor.double() for name, tensor in t.items()}
    x = t["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.layers.{i}"
        own = {
            name.removeprefix(f"{at}.mixer."): w for name, w in t.items() if name.startswith(f"{at}.mixer.")
        }

        def normed(h: Tensor, name: str, offset: float, at: str = at) -> Tensor:
            return unit(h, c["rms_norm_eps"]) * (t[f"{at}.{name}_norm.weight"] + offset)

        mix = recurrent if is_recurrent(c, i) else attention
        x = x + normed(mix(c, own, normed(x, "pre_mixer", 1.0), i), "post_mixer", 1 / 5)
        gate, up = (normed(x, "pre_mlp", 1.0) @ t[f"{at}.mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + normed((F.silu(gate) * up) @ t[f"{at}.mlp.down_proj.weight"].T, "post_mlp", 1 / 5**1.5)
    return (unit(x, c["rms_norm_eps"]) * (t["model.norm.weight"] + 1)) @ t["model.embed_tokens.weight"].T


def unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def recurrent(c: dict[str, Any], w: dict[str, Tensor], x: Tensor, i: int) -> Tensor:
    """Each head has its gate and its x side by side; B, C and the step come from the convolved x."""
    heads, dim, state, width = (
        c["mamba_num_heads"],
        c["hidden_size_per_head"],
        c["mamba_d_state"],
        c["mamba_d_conv"],
    )
    gate, u = (x @ w["in_proj.weight"].T).view(len(x), heads, 2 * dim).split(dim, -1)
    u = u.reshape(len(x), heads * dim)
    past = torch.cat([u.new_zeros(width - 1, heads * dim), u])
    taps = w["conv1d.weight"][:, 0]
    u = F.silu(torch.stack([(past[t : t + width].T * taps).sum(-1) for t in range(len(x))]))
    parts = (u @ w["bcdt_proj.weight"].T).split([state, state, RANK], -1)
    B, C, dt = (
        unit(p, c["rms_norm_eps"]) * w[f"{n}_norm_weight"]
        for p, n in zip(parts, ("B", "C", "dt"), strict=True)
    )
    step = F.softplus(dt @ w["dt_proj.weight"].T + w["dt_bias"])
    A, h, out = -w["A_log"].exp(), x.new_zeros(heads, dim, state), []
    for t in range(len(x)):
        v = u[t].view(heads, dim)
        h = (step[t] * A).exp()[:, None, None] * h + (step[t][:, None] * v)[..., None] * B[t]
        out.append(((h * C[t]).sum(-1) + w["D"][:, None] * v) * F.silu(gate[t]))
    return torch.stack(out).flatten(1) @ w["out_proj.weight"].T


def attention(c: dict[str, Any], w: dict[str, Tensor], x: Tensor, i: int) -> Tensor:
    """q and k are normed and weighed by head; a query sees `attention_window_size` keys before itself."""
    n, dim, kv = c["num_attention_heads"], c["hidden_size_per_head"], c["num_key_value_heads"]
    q, k, v = (x @ w["qkv_proj.weight"].T).view(len(x), n + 2 * kv, dim).split([n, kv, kv], 1)
    q, k = unit(q, 1e-6) * w["q_weight"], unit(k, 1e-6) * w["k_weight"]
    turn = torch.arange(len(x)).double()[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = (torch.cat([f(turn)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

    def rotated(a: Tensor) -> Tensor:
        first, second = a.chunk(2, -1)
        return a * cos + torch.cat([-second, first], -1) * sin

    q, k, v = rotated(q), rotated(k).repeat_interleave(n // kv, 1), v.repeat_interleave(n // kv, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
    ago = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = ago >= 0
    if i not in c["full_attention_idx"]:
        seen &= ago <= c["attention_window_size"]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1) @ w["o_proj.weight"].T
