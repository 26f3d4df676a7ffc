"""Ling 2.5, written down plainly from its published description: the oracle of what transformers lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_group_size": 3,
    "num_attention_heads": 4,
    "head_dim": 10,
    "partial_rotary_factor": 0.4,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "score_function": "sigmoid",
    "routed_scaling_factor": 2.0,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
EPS = CONFIG["rms_norm_eps"]


def checkpoint(c: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """Random tensors under the names of published files."""
    g = torch.Generator().manual_seed(seed)
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    nope, turned, v, rank = (
        c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (c["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}

    def add_mlp(at: str, size: int) -> None:
        for x in ("gate", "up", "down"):
            shapes[f"{at}.{x}_proj.weight"] = (hidden, size) if x == "down" else (size, hidden)

    for i in range(c["num_hidden_layers"]):
        at, attn = f"model.layers.{i}", f"model.layers.{i}.attention"
        shapes |= {f"{at}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
        if (i + 1) % c["layer_group_size"]:
            shapes[f"{attn}.query_key_value.weight"] = (3 * heads * dim, hidden)
            shapes |= {f"{attn}.{x}_layernorm.weight": (dim,) for x in ("query", "key")}
            shapes |= {
                f"{attn}.g_proj.weight": (heads * dim, hidden),
                f"{attn}.g_norm.weight": (heads * dim,),
            }
            shapes[f"{attn}.dense.weight"] = (hidden, heads * dim)
        else:
            shapes[f"{attn}.q_a_proj.weight"] = (c["q_lora_rank"], hidden)
            shapes[f"{attn}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
            shapes[f"{attn}.q_b_proj.weight"] = (heads * (nope + turned), c["q_lora_rank"])
            shapes[f"{attn}.kv_a_proj_with_mqa.weight"] = (rank + turned, hidden)
            shapes[f"{attn}.kv_a_layernorm.weight"] = (rank,)
            shapes[f"{attn}.kv_b_proj.weight"] = (heads * (nope + v), rank)
            shapes[f"{attn}.dense.weight"] = (hidden, heads * v)
        if i < c["first_k_dense_replace"]:
            add_mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"], shapes[f"{at}.mlp.gate.expert_bias"] = (
            (c["num_experts"], hidden),
            (c["num_experts"],),
        )
        for e in ("shared_experts", *(f"experts.{e}" for e in range(c["num_experts"]))):
            add_mlp(f"{at}.mlp.{e}", c["moe_intermediate_size"])
    return {
        name: torch.randn(shape, generator=g).double() * (0.2 if len(shape) > 1 else 0.3) + ("norm" in name)
        for name, shape in shapes.items()
    }


def rms(x: Tensor, w: Tensor, groups: int = 1) -> Tensor:
    h = x.unflatten(-1, (groups, -1))
    return (h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2) * w


def turn(x: Tensor, theta: float, width: int, *, neighbours: bool) -> Tensor:
    """Rotate the first `width` numbers of each head by its position. x: [T, heads, d]."""
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    part, rest = x[..., :width], x[..., width:]
    a, b = (part[..., 0::2], part[..., 1::2]) if neighbours else part.chunk(2, -1)
    pair = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    both = torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)
    return torch.cat([both, rest], -1)


def mlp(t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate = torch.nn.functional.silu(x @ t[f"{at}.gate_proj.weight"].T)
    return (gate * (x @ t[f"{at}.up_proj.weight"].T)) @ t[f"{at}.down_proj.weight"].T


def experts(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    scores = (x @ t[f"{at}.gate.weight"].T).sigmoid()
    out, size = mlp(t, f"{at}.shared_experts", x), c["num_experts"] // c["n_group"]
    for row, s in enumerate(scores):
        choice = s + t[f"{at}.gate.expert_bias"]
        best = choice.view(-1, size).topk(2).values.sum(-1).topk(c["topk_group"]).indices.tolist()
        allowed = torch.full_like(choice, -torch.inf)
        for g in best:
            allowed[g * size : (g + 1) * size] = choice[g * size : (g + 1) * size]
        chosen = allowed.topk(c["num_experts_per_tok"]).indices
        for e in chosen.tolist():
            weight = c["routed_scaling_factor"] * s[e] / s[chosen].sum()
            out[row] += weight * mlp(t, f"{at}.experts.{e}", x[row])
    return out


def lightning(c: dict[str, Any], t: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
    at, heads, dim = f"model.layers.{i}.attention", c["num_attention_heads"], c["head_dim"]
    q, k, v = (x @ t[f"{at}.query_key_value.weight"].T).view(len(x), 3, heads, dim).unbind(1)
    width = int(dim * c["partial_rotary_factor"])
    q, k = rms(q, t[f"{at}.query_layernorm.weight"]), rms(k, t[f"{at}.key_layernorm.weight"])
    q, k = (turn(m, c["rope_theta"], width, neighbours=False) for m in (q, k))
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads)
    slopes = slopes * (1 - i / (c["num_hidden_layers"] - 1) + 1e-5)
    state, out = torch.zeros(heads, dim, dim).double(), torch.empty_like(v)
    for n in range(len(x)):
        state = state * (-slopes).exp()[:, None, None] + k[n][:, :, None] * v[n][:, None, :]
        out[n] = (q[n][:, None, :] @ state)[:, 0] * dim**-0.5
    y = rms(out.flatten(1), t[f"{at}.g_norm.weight"], c["group_norm_size"])
    return (y * (x @ t[f"{at}.g_proj.weight"].T).sigmoid()) @ t[f"{at}.dense.weight"].T


def latent(c: dict[str, Any], t: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
    at, heads, nope = f"model.layers.{i}.attention", c["num_attention_heads"], c["qk_nope_head_dim"]
    turned, rank = c["qk_rope_head_dim"], c["kv_lora_rank"]
    q = rms(x @ t[f"{at}.q_a_proj.weight"].T, t[f"{at}.q_a_layernorm.weight"])
    q = (q @ t[f"{at}.q_b_proj.weight"].T).view(len(x), heads, -1)
    both = x @ t[f"{at}.kv_a_proj_with_mqa.weight"].T
    kv = rms(both[:, :rank], t[f"{at}.kv_a_layernorm.weight"]) @ t[f"{at}.kv_b_proj.weight"].T
    k, v = kv.view(len(x), heads, -1).split([nope, c["v_head_dim"]], -1)
    rotated = turn(both[:, None, rank:], c["rope_theta"], turned, neighbours=True).expand(-1, heads, -1)
    q = torch.cat([q[..., :nope], turn(q[..., nope:], c["rope_theta"], turned, neighbours=True)], -1)
    scores = torch.einsum("nhd,thd->hnt", q, torch.cat([k, rotated], -1)) * (nope + turned) ** -0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), v).flatten(1) @ t[f"{at}.dense.weight"].T


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[T] -> [T, vocab] float64."""
    x = t["model.word_embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        mix = lightning if (i + 1) % c["layer_group_size"] else latent
        x = x + mix(c, t, i, rms(x, t[f"{at}.input_layernorm.weight"]))
        h = rms(x, t[f"{at}.post_attention_layernorm.weight"])
        x = x + (mlp(t, f"{at}.mlp", h) if i < c["first_k_dense_replace"] else experts(c, t, f"{at}.mlp", h))
    return rms(x, t["model.norm.weight"]) @ t["lm_head.weight"].T
