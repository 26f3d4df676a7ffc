"""Jet-Nemotron, written down plainly from its paper and config: the oracle for a model transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.plamo3_oracle import rms, turned

JET = {"expand_v": 1.5, "num_heads": 3, "head_dim": 6, "norm_eps": "1e-4", "conv_size": 4}
CONFIG: dict[str, Any] = {
    "architectures": ["JetNemotronForCausalLM"],
    "model_type": "jet_nemotron",
    "vocab_size": 97,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000,
    "layer_types": ["jet", "swa", "jet", "attn"],
    "efficient_attention_config": {
        "jet": {**JET, "mode": "chunk", "dconv_generator_reduction": 3, "dconv_implementation": "triton"},
        "swa": {"window_size": 5},
    },
    "tie_word_embeddings": True,
}


def checkpoint(c: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the names of the published models, in double precision."""
    torch.manual_seed(1)
    n, dim, made = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"], dict[str, Tensor]()

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        made[name] = torch.randn(shape, dtype=torch.float64) * (0.3 if len(shape) == 1 else 0.2) + around

    put("model.embed_tokens.weight", c["vocab_size"], n)
    put("model.norm.weight", n, around=1.0)
    heads, keys, values = JET["num_heads"], 18, 27
    for i, kind in enumerate(c["layer_types"]):
        layer, mix = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        put(f"{layer}.input_layernorm.weight", n, around=1.0)
        put(f"{layer}.post_attention_layernorm.weight", n, around=1.0)
        for x in ("gate", "up"):
            put(f"{layer}.mlp.{x}_proj.weight", c["intermediate_size"], n)
        put(f"{layer}.mlp.down_proj.weight", n, c["intermediate_size"])
        if kind == "jet":
            for x, rows in {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "g": values}.items():
                put(f"{mix}.{x}_proj.weight", rows, n)
            put(f"{mix}.o_proj.weight", n, values)
            put(f"{mix}.A_log", heads)
            put(f"{mix}.dt_bias", heads)
            put(f"{mix}.o_norm.weight", values // heads, around=1.0)
            put(f"{mix}.dynamic_conv1d.kernel_generator.w1.weight", values // 3, n)
            put(f"{mix}.dynamic_conv1d.kernel_generator.w2.weight", 4 * values, values // 3)
            put(f"{mix}.dynamic_conv1d.kernel_generator.w2.bias", 4 * values)
            continue
        for x, count in {"q": c["num_attention_heads"], "k": 2, "v": 2}.items():
            put(f"{mix}.{x}_proj.weight", count * dim, n)
            put(f"{mix}.{x}_proj.bias", count * dim)
        put(f"{mix}.o_proj.weight", n, n)
    return made


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}"
        h = rms(x, t[f"{layer}.input_layernorm.weight"], eps)
        own = {
            k.removeprefix(f"{layer}.self_attn."): v
            for k, v in t.items()
            if k.startswith(f"{layer}.self_attn.")
        }
        x = x + (_jet(own, h) if kind == "jet" else _attention(c, own, h, 6 if kind == "swa" else len(h)))
        h = rms(x, t[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = (h @ t[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ t[f"{layer}.mlp.down_proj.weight"].T
    return rms(x, t["model.norm.weight"], eps) @ t["model.embed_tokens.weight"].T


def _attention(c: dict[str, Any], t: dict[str, Tensor], h: Tensor, visible: int) -> Tensor:
    """`visible` keys, the query's own included."""
    dim = c["hidden_size"] // c["num_attention_heads"]
    q, k, v = ((h @ t[f"{x}_proj.weight"].T + t[f"{x}_proj.bias"]).unflatten(-1, (-1, dim)) for x in "qkv")
    q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    at = torch.arange(len(h))
    behind = at[:, None] - at[None]
    scores = torch.einsum("nhd,mhd->hnm", q, k) * dim**-0.5
    probs = scores.masked_fill((behind < 0) | (behind >= visible), -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", probs, v).flatten(1) @ t["o_proj.weight"].T


def _jet(t: dict[str, Tensor], h: Tensor) -> Tensor:
    heads, kernel = JET["num_heads"], JET["conv_size"]
    q, k = (F.silu(h @ t[f"{x}_proj.weight"].T).unflatten(-1, (heads, -1)) for x in "qk")
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    generator = "dynamic_conv1d.kernel_generator"
    taps = (
        F.silu(h @ t[f"{generator}.w1.weight"].T) @ t[f"{generator}.w2.weight"].T + t[f"{generator}.w2.bias"]
    )
    v = h @ t["v_proj.weight"].T
    padded = torch.cat([v.new_zeros(kernel - 1, v.shape[1]), v])
    seen = padded.unfold(0, kernel, 1)  # [T, channels, taps]
    v = F.silu((seen * taps.unflatten(-1, (-1, kernel))).sum(-1)).unflatten(-1, (heads, -1))
    decay = torch.exp(-t["A_log"].exp() * F.softplus(h @ t["a_proj.weight"].T + t["dt_bias"]))
    beta = (h @ t["b_proj.weight"].T).sigmoid()
    state, ys = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for n in range(len(h)):
        state = state * decay[n][:, None, None]
        error = v[n] - torch.einsum("hkv,hk->hv", state, k[n])
        state = state + beta[n][:, None, None] * k[n][..., None] * error[:, None]
        ys.append(torch.einsum("hkv,hk->hv", state, q[n]) * q.shape[-1] ** -0.5)
    y = rms(torch.stack(ys), t["o_norm.weight"], float(JET["norm_eps"])).flatten(1)
    return (y * F.silu(h @ t["g_proj.weight"].T)) @ t["o_proj.weight"].T
