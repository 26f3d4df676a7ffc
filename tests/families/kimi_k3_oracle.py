"""Kimi-K3's text, written down plainly from its report and config: the oracle of what transformers lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = "attn_res_block_size"
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 44,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.3,
    "routed_expert_hidden_size": 24,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    BLOCK: 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4, 5],
        "full_attn_layers": [3, 6],
        "head_dim": 10,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": TEXT,
    "tie_word_embeddings": False,
}
EPS, LATENT_EPS, TOP = TEXT["rms_norm_eps"], 1e-6, "language_model.model"


def checkpoint(c: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """Random tensors under the names of the published files."""
    g, linear = torch.Generator().manual_seed(seed), c["linear_attn_config"]
    hidden, heads, nope, turned = (
        c[x] for x in ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    wide, dim = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
    outputs, latent = heads * c["v_head_dim"], c["routed_expert_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{TOP}.embed_tokens.weight": (c["vocab_size"], hidden)}
    shapes |= {f"{TOP}.norm.weight": (hidden,), "language_model.lm_head.weight": (c["vocab_size"], hidden)}

    def add_res(at: str) -> None:
        shapes.update({f"{at}_norm.weight": (hidden,), f"{at}_proj.weight": (1, hidden)})

    def add_mlp(at: str, size: int) -> None:
        for x in ("gate", "up", "down"):
            shapes[f"{at}.{x}_proj.weight"] = (hidden, size) if x == "down" else (size, hidden)

    add_res(f"{TOP}.output_attn_res")
    for i in range(c["num_hidden_layers"]):
        at, attn = f"{TOP}.layers.{i}", f"{TOP}.layers.{i}.self_attn"
        shapes |= {f"{at}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
        add_res(f"{at}.self_attention_res")
        add_res(f"{at}.mlp_res")
        if i + 1 in linear["kda_layers"]:
            shapes |= {f"{attn}.{x}_proj.weight": (wide, hidden) for x in "qkvg"}
            taps = linear["short_conv_kernel_size"]
            shapes |= {f"{attn}.{x}_conv1d.weight": (wide, 1, taps) for x in "qkv"}
            shapes |= {f"{attn}.f_a_proj.weight": (dim, hidden), f"{attn}.f_b_proj.weight": (wide, dim)}
            shapes |= {f"{attn}.b_proj.weight": (linear["num_heads"], hidden), f"{attn}.dt_bias": (wide,)}
            shapes |= {f"{attn}.A_log": (linear["num_heads"],), f"{attn}.o_norm.weight": (dim,)}
            shapes[f"{attn}.o_proj.weight"] = (hidden, wide)
        else:
            shapes[f"{attn}.q_a_proj.weight"] = (c["q_lora_rank"], hidden)
            shapes[f"{attn}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
            shapes[f"{attn}.q_b_proj.weight"] = (heads * (nope + turned), c["q_lora_rank"])
            shapes[f"{attn}.kv_a_proj_with_mqa.weight"] = (c["kv_lora_rank"] + turned, hidden)
            shapes[f"{attn}.kv_a_layernorm.weight"] = (c["kv_lora_rank"],)
            shapes[f"{attn}.kv_b_proj.weight"] = (heads * (nope + c["v_head_dim"]), c["kv_lora_rank"])
            shapes |= {f"{attn}.g_proj.weight": (outputs, hidden), f"{attn}.o_proj.weight": (hidden, outputs)}
        if i < c["first_k_dense_replace"]:
            add_mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        moe, size = f"{at}.block_sparse_moe", c["moe_intermediate_size"]
        shapes[f"{moe}.gate.weight"] = (c["num_experts"], hidden)
        shapes[f"{moe}.gate.e_score_correction_bias"] = (c["num_experts"],)
        shapes[f"{moe}.routed_expert_down_proj.weight"] = (latent, hidden)
        shapes[f"{moe}.routed_expert_up_proj.weight"] = (hidden, latent)
        shapes[f"{moe}.routed_expert_norm.weight"] = (latent,)
        add_mlp(f"{moe}.shared_experts", size * c["num_shared_experts"])
        for e in range(c["num_experts"]):
            shapes |= {f"{moe}.experts.{e}.w{n}.weight": (size, latent) for n in (1, 3)}
            shapes[f"{moe}.experts.{e}.w2.weight"] = (latent, size)
    return {
        name: torch.randn(shape, generator=g).double() * (0.2 if len(shape) > 1 else 0.3) + ("norm" in name)
        for name, shape in shapes.items()
    }


def rms(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def delta(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """Kimi Delta Attention, token by token; a decay's log is between the lower bound and 0."""
    own = c["linear_attn_config"]
    heads, dim, taps = own["num_heads"], own["head_dim"], own["short_conv_kernel_size"]

    def convolved(name: str) -> Tensor:
        h = torch.cat([torch.zeros(taps - 1, heads * dim).double(), x @ t[f"{at}.{name}_proj.weight"].T])
        kernel = t[f"{at}.{name}_conv1d.weight"][:, 0]
        y = sum(h[k : k + len(x)] * kernel[:, k] for k in range(taps))
        return torch.nn.functional.silu(y).view(len(x), heads, dim)

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (q, k))
    f = (x @ t[f"{at}.f_a_proj.weight"].T @ t[f"{at}.f_b_proj.weight"].T + t[f"{at}.dt_bias"]).view(k.shape)
    decay = own["gate_lower_bound"] * (t[f"{at}.A_log"].exp()[:, None] * f).sigmoid()
    beta = (x @ t[f"{at}.b_proj.weight"].T).sigmoid()
    state, out = torch.zeros(heads, dim, dim).double(), torch.empty_like(v)
    for n in range(len(x)):
        state = state * decay[n].exp()[:, :, None]
        missed = v[n] - torch.einsum("hk,hkv->hv", k[n], state)
        state = state + torch.einsum("hk,hv->hkv", k[n], beta[n][:, None] * missed)
        out[n] = torch.einsum("hk,hkv->hv", q[n], state) * dim**-0.5
    gate = (x @ t[f"{at}.g_proj.weight"].T).sigmoid().view(out.shape)
    return (rms(out, t[f"{at}.o_norm.weight"]) * gate).flatten(1) @ t[f"{at}.o_proj.weight"].T


def latent(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    heads, nope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
    q = rms(x @ t[f"{at}.q_a_proj.weight"].T, t[f"{at}.q_a_layernorm.weight"], LATENT_EPS)
    q = (q @ t[f"{at}.q_b_proj.weight"].T).view(len(x), heads, -1)
    both = x @ t[f"{at}.kv_a_proj_with_mqa.weight"].T
    kv = rms(both[:, :rank], t[f"{at}.kv_a_layernorm.weight"], LATENT_EPS) @ t[f"{at}.kv_b_proj.weight"].T
    k, v = kv.view(len(x), heads, -1).split([nope, c["v_head_dim"]], -1)
    k = torch.cat([k, both[:, None, rank:].expand(-1, heads, -1)], -1)
    scores = torch.einsum("nhd,thd->hnt", q, k) / math.sqrt(k.shape[-1])
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    out = torch.einsum("hnt,thd->nhd", scores.softmax(-1), v).flatten(1)
    return (out * (x @ t[f"{at}.g_proj.weight"].T).sigmoid()) @ t[f"{at}.o_proj.weight"].T


def mlp(t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = (x @ t[f"{at}.{name}_proj.weight"].T for name in ("gate", "up"))
    return situ(gate, up) @ t[f"{at}.down_proj.weight"].T


def experts(c: dict[str, Any], t: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    scores, low = (x @ t[f"{at}.gate.weight"].T).sigmoid(), x @ t[f"{at}.routed_expert_down_proj.weight"].T
    out = torch.zeros_like(low)
    for row, s in enumerate(scores):
        chosen = (s + t[f"{at}.gate.e_score_correction_bias"]).topk(c["num_experts_per_token"]).indices
        for e in chosen.tolist():
            gate, up = (t[f"{at}.experts.{e}.w{n}.weight"] @ low[row] for n in (1, 3))
            weight = c["routed_scaling_factor"] * s[e] / s[chosen].sum()
            out[row] += weight * (t[f"{at}.experts.{e}.w2.weight"] @ situ(gate, up))
    routed = rms(out, t[f"{at}.routed_expert_norm.weight"]) @ t[f"{at}.routed_expert_up_proj.weight"].T
    return routed + mlp(t, f"{at}.shared_experts", x)


def over_depth(t: dict[str, Tensor], at: str, sources: list[Tensor]) -> Tensor:
    """Attention over what blocks of layers gave, a token's own."""
    values = torch.stack(sources, 1)
    scores = rms(values, t[f"{at}_norm.weight"]) @ t[f"{at}_proj.weight"][0]
    return (scores.softmax(-1)[:, :, None] * values).sum(1)


def logits(c: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[T] -> [T, vocab] float64. c: the text's config."""
    whole, blocks = t[f"{TOP}.embed_tokens.weight"][ids], list[Tensor]()
    for i in range(c["num_hidden_layers"]):
        at = f"{TOP}.layers.{i}"
        read = over_depth(t, f"{at}.self_attention_res", [*blocks, whole]) if blocks else whole
        mix = delta if i + 1 in c["linear_attn_config"]["kda_layers"] else latent
        y = mix(c, t, f"{at}.self_attn", rms(read, t[f"{at}.input_layernorm.weight"]))
        if i % c[BLOCK] == 0:
            blocks, whole = [*blocks, whole], y
        else:
            whole = whole + y
        h = over_depth(t, f"{at}.mlp_res", [*blocks, whole])
        h = rms(h, t[f"{at}.post_attention_layernorm.weight"])
        is_dense = i < c["first_k_dense_replace"]
        whole = whole + (mlp(t, f"{at}.mlp", h) if is_dense else experts(c, t, f"{at}.block_sparse_moe", h))
    h = over_depth(t, f"{TOP}.output_attn_res", [*blocks, whole])
    return rms(h, t[f"{TOP}.norm.weight"]) @ t["language_model.lm_head.weight"].T
