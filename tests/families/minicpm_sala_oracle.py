"""MiniCPM-SALA in plain torch, from its published description; in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "mup_denominator": 4,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "lightning_use_rope": True,
    "lightning_nh": 3,
    "lightning_nkv": 3,
    "lightning_head_dim": 12,
    "lightning_scale": "1/sqrt(d)",
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "tie_word_embeddings": False,
    "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn", "minicpm4"],
    "sparse_config": {"kernel_size": 32, "kernel_stride": 16, "block_size": 64, "topk": 64, "dense_len": 128},
}
EPS = CONFIG["rms_norm_eps"]
SLOPES = (2.0**-4, 2.0**-8, 2.0**-2)  # of two heads, then the first of four: three are no power of two


def checkpoint(c: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    g, hidden, size = torch.Generator().manual_seed(seed), c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }
    for i, kind in enumerate(c["mixer_types"]):
        at, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        shapes |= {f"{at}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
        shapes |= {f"{at}.mlp.{x}_proj.weight": (size, hidden) for x in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, size)
        if kind == "minicpm4":
            q, kv = (c[f"num_{x}_heads"] * c["head_dim"] for x in ("attention", "key_value"))
            shapes |= {f"{attn}.{x}_proj.weight": (q if x == "q" else kv, hidden) for x in "qkv"}
            shapes |= {f"{attn}.o_gate.weight": (q, hidden), f"{attn}.o_proj.weight": (hidden, q)}
        else:
            dim = c["lightning_head_dim"]
            wide = c["lightning_nh"] * dim
            shapes |= {f"{attn}.{x}_proj.weight": (wide, hidden) for x in "qkvz"}
            shapes |= {f"{attn}.{x}_norm.weight": (dim,) for x in "qk"}
            shapes |= {f"{attn}.o_norm.weight": (wide,), f"{attn}.o_proj.weight": (hidden, wide)}
    return {
        name: torch.randn(shape, generator=g).double() * (0.2 if len(shape) > 1 else 0.3) + ("norm" in name)
        for name, shape in shapes.items()
    }


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w


def turn(x: Tensor, theta: float) -> Tensor:
    """Halves of each head by its position. x: [T, heads, d]."""
    size = x.shape[-1]
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(0, size, 2).double() / size)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    q, k, v = ((x @ t[f"{at}.{n}_proj.weight"].T).view(len(x), -1, c["head_dim"]) for n in "qkv")
    k, v = (m.repeat_interleave(c["num_attention_heads"] // c["num_key_value_heads"], 1) for m in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q, k) * c["head_dim"] ** -0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    out = torch.einsum("hnt,thd->nhd", scores.softmax(-1), v).flatten(1)
    return (out * (x @ t[f"{at}.o_gate.weight"].T).sigmoid()) @ t[f"{at}.o_proj.weight"].T


def lightning(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    heads, dim = c["lightning_nh"], c["lightning_head_dim"]
    q, k, v = ((x @ t[f"{at}.{n}_proj.weight"].T).view(len(x), heads, dim) for n in "qkv")
    q, k = (turn(rms(m, t[f"{at}.{n}_norm.weight"]), c["rope_theta"]) for m, n in ((q, "q"), (k, "k")))
    decay = (-torch.tensor(SLOPES).double()).exp()[:, None, None]
    state, out = torch.zeros(heads, dim, dim).double(), torch.empty_like(v)
    for n in range(len(x)):
        state = state * decay + k[n][:, :, None] * v[n][:, None, :]
        out[n] = (q[n][:, None, :] @ state)[:, 0] * dim**-0.5
    y = rms(out.flatten(1), t[f"{at}.o_norm.weight"]) * (x @ t[f"{at}.z_proj.weight"].T).sigmoid()
    return y @ t[f"{at}.o_proj.weight"].T


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[T] -> [T, vocab] float64."""
    x = t["model.embed_tokens.weight"][ids] * c["scale_emb"]
    scale = c["scale_depth"] / c["num_hidden_layers"] ** 0.5
    for i, kind in enumerate(c["mixer_types"]):
        at = f"model.layers.{i}"
        mix = attention if kind == "minicpm4" else lightning
        x = x + scale * mix(c, t, f"{at}.self_attn", rms(x, t[f"{at}.input_layernorm.weight"]))
        h = rms(x, t[f"{at}.post_attention_layernorm.weight"])
        gate, up = (h @ t[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + scale * ((torch.nn.functional.silu(gate) * up) @ t[f"{at}.mlp.down_proj.weight"].T)
    h = rms(x, t["model.norm.weight"]) * c["dim_model_base"] / c["hidden_size"]
    return h @ t["lm_head.weight"].T
