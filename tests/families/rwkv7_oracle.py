"""RWKV-7, written down from its paper (Peng et al. 2025): the oracle for a model transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": 97,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "head_dim": 10,
    "intermediate_size": 44,
    "hidden_act": "sqrelu",
    "decay_low_rank_dim": 5,
    "gate_low_rank_dim": 7,
    "a_low_rank_dim": 6,
    "v_low_rank_dim": 3,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "attn": None,
    "tie_word_embeddings": False,
}


def checkpoint(c: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the names of flash-linear-attention's models, in double precision."""
    torch.manual_seed(1)
    n, dim, made = c["hidden_size"], c["head_dim"], dict[str, Tensor]()

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        made[name] = torch.randn(shape, dtype=torch.float64) * (0.3 if len(shape) == 1 else 0.2) + around

    def layer_norm(name: str) -> None:
        put(f"{name}.weight", n, around=1.0)
        put(f"{name}.bias", n)

    put("model.embeddings.weight", c["vocab_size"], n)
    put("lm_head.weight", c["vocab_size"], n)
    layer_norm("model.norm")
    layer_norm("model.layers.0.pre_norm")
    ranks = {"w": c["decay_low_rank_dim"], "a": c["a_low_rank_dim"], "g": c["gate_low_rank_dim"]}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        layer_norm(f"{layer}.attn_norm")
        layer_norm(f"{layer}.ffn_norm")
        layer_norm(f"{layer}.attn.g_norm")
        for x in ("r", "w", "k", "v", "a", "g"):
            put(f"{layer}.attn.x_{x}", 1, 1, n)
        for x in "rkvo":
            put(f"{layer}.attn.{x}_proj.weight", n, n)
        for x, rank in {**ranks, **({"v": c["v_low_rank_dim"]} if i else {})}.items():
            put(f"{layer}.attn.{x}_lora.lora.0.weight", rank, n)
            put(f"{layer}.attn.{x}_lora.lora.2.weight", n, rank)
            if x != "g":
                put(f"{layer}.attn.{x}_lora.lora.2.bias", n)
        put(f"{layer}.attn.k_k", n, around=0.8)
        put(f"{layer}.attn.k_a", n, around=1.0)
        put(f"{layer}.attn.r_k", n // dim, dim)
        put(f"{layer}.ffn.x_k", n)
        put(f"{layer}.ffn.key.weight", c["intermediate_size"], n)
        put(f"{layer}.ffn.value.weight", n, c["intermediate_size"])
    return made


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64. `heads_eps` instead of what files in safetensors mean: llama.cpp's."""

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], c["norm_eps"])

    x, first = layer_norm(t["model.embeddings.weight"][ids], "model.layers.0.pre_norm"), None
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out, first = _time_mix(c, t, f"{layer}.attn", layer_norm(x, f"{layer}.attn_norm"), first)
        x = x + out
        h = layer_norm(x, f"{layer}.ffn_norm")
        k = h + _change(h) * t[f"{layer}.ffn.x_k"]
        x = x + (k @ t[f"{layer}.ffn.key.weight"].T).relu().square() @ t[f"{layer}.ffn.value.weight"].T
    return layer_norm(x, "model.norm") @ t["lm_head.weight"].T


def _change(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]]) - x


def _time_mix(
    c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    dim, change = c["head_dim"], _change(x)
    heads = x.shape[1] // dim
    r, w, k, v, a, g = (x + change * t[f"{at}.x_{name}"][0, 0] for name in ("r", "w", "k", "v", "a", "g"))

    def low(name: str, y: Tensor, inner: Any = None) -> Tensor:
        y = y @ t[f"{at}.{name}_lora.lora.0.weight"].T
        y = (inner(y) if inner else y) @ t[f"{at}.{name}_lora.lora.2.weight"].T
        return y + t.get(f"{at}.{name}_lora.lora.2.bias", torch.zeros(1, dtype=torch.float64))

    decay = torch.exp(-torch.exp(-F.softplus(-low("w", w, torch.tanh)) - 0.5))
    share, a, gate = v, low("a", a).sigmoid(), low("g", g, torch.sigmoid)
    r, k, v = r @ t[f"{at}.r_proj.weight"].T, k @ t[f"{at}.k_proj.weight"].T, v @ t[f"{at}.v_proj.weight"].T
    v = v if first is None else v + (first - v) * low("v", share).sigmoid()
    unit = F.normalize((k * t[f"{at}.k_k"]).view(-1, heads, dim), dim=-1)
    k = (k + k * (a - 1) * t[f"{at}.k_a"]).view(-1, heads, dim)
    r, values, a, decay = (part.view(-1, heads, dim) for part in (r, v, a, decay))
    state, ys = torch.zeros(heads, dim, dim, dtype=torch.float64), []  # [values, keys], as in the paper
    for n in range(len(x)):
        removed = (state @ unit[n][:, :, None]) @ (unit[n] * a[n])[:, None, :]
        state = state * decay[n][:, None, :] - removed + values[n][:, :, None] @ k[n][:, None, :]
        ys.append((state @ r[n][:, :, None])[..., 0])
    y = F.group_norm(
        torch.stack(ys).flatten(1),
        heads,
        t[f"{at}.g_norm.weight"],
        t[f"{at}.g_norm.bias"],
        c.get("heads_eps", dim * c["norm_eps"]),
    )
    own = ((r * k * t[f"{at}.r_k"]).sum(-1, keepdim=True) * values).flatten(1)
    return ((y + own) * gate) @ t[f"{at}.o_proj.weight"].T, v if first is None else first
