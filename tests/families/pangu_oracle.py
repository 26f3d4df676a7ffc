"""openPangu Ultra MoE written down plainly, from its published description: config, tensors, logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
    HEADS,
    INNER,
    SIZE,
    USUAL,
    VOCAB,
    Config,
    OlderFamily,
    Tensors,
    attend,
    heads_of,
    rms,
    turned,
)

CONFIG: Config = {
    **{key: value for key, value in USUAL.items() if key != "num_key_value_heads"},
    "architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "hidden_act": "silu",
    "attention_q_lora_dim": 12, "attention_kv_lora_dim": 16, "attention_qk_dim": 8,
    "attention_qk_rope_dim": 4, "attention_v_dim": 10, "num_routed_experts": 6, "num_experts_per_tok": 3,
    "num_shared_experts": 2, "num_dense_layers": 1, "moe_intermediate_size": 14, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rope_theta": 2.56e7, "sandwich_norm": True, "num_mtp_layers": 1,
    "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip


def _mlp(at: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"{at}.{x}_proj.weight", (size, SIZE)) for x in ("gate", "up"))
    yield f"{at}.down_proj.weight", (SIZE, size)


def _shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    yield "lm_head.weight", (VOCAB, SIZE)
    q, kv, dim = c["attention_q_lora_dim"], c["attention_kv_lora_dim"], c["attention_qk_dim"]
    turns, value, size = c["attention_qk_rope_dim"], c["attention_v_dim"], c["moe_intermediate_size"]
    norms = ["input", "post_attention", *(["pre_mlp", "post_mlp"] if c["sandwich_norm"] else [])]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        attn = {
            "q_a_proj": (q, SIZE), "q_a_layernorm": (q,), "q_b_proj": (HEADS * (dim + turns), q),
            "kv_a_proj_with_mqa": (kv + turns, SIZE), "kv_a_layernorm": (kv,),
            "kv_b_proj": (HEADS * (dim + value), kv), "o_proj": (SIZE, HEADS * value),
        }  # fmt: skip
        yield from ((f"{at}.self_attn.{name}.weight", shape) for name, shape in attn.items())
        yield from ((f"{at}.{name}_layernorm.weight", (SIZE,)) for name in norms)
        if i < c["num_dense_layers"]:
            yield from _mlp(f"{at}.mlp", INNER)
            continue
        yield f"{at}.mlp.gate.weight", (c["num_routed_experts"], SIZE)
        if c.get("router_enable_expert_bias"):
            yield f"{at}.mlp.e_score_correction_bias", (c["num_routed_experts"],)
        yield from _mlp(f"{at}.mlp.shared_experts", size * c["num_shared_experts"])
        for e in range(c["num_routed_experts"]):
            yield from _mlp(f"{at}.mlp.experts.{e}", size)


def _feed(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate, up, down = (w[f"{at}.{name}_proj"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _experts(c: Config, x: Tensor, w: Tensors) -> Tensor:
    scores = (x @ w["mlp.gate"].T).sigmoid()
    choice = scores + w.get("mlp.e_score_correction_bias", torch.zeros(1))
    best = choice.topk(c["num_experts_per_tok"], -1).indices
    chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
    weights = scores * chosen
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if c["norm_topk_prob"] else weights
    weights = weights * c["routed_scaling_factor"]
    every = [weights[:, e, None] * _feed(x, w, f"mlp.experts.{e}") for e in range(scores.shape[1])]
    return torch.stack(every).sum(0) + _feed(x, w, "mlp.shared_experts")


def _attention(c: Config, x: Tensor, w: Tensors) -> Tensor:
    dim, turns, value = c["attention_qk_dim"], c["attention_qk_rope_dim"], c["attention_v_dim"]
    latent = rms(x @ w["self_attn.q_a_proj"].T, w["self_attn.q_a_layernorm"], 1e-6)
    q = heads_of(latent @ w["self_attn.q_b_proj"].T, dim + turns)
    kv, shared = (x @ w["self_attn.kv_a_proj_with_mqa"].T).split([c["attention_kv_lora_dim"], turns], -1)
    up = rms(kv, w["self_attn.kv_a_layernorm"], 1e-6) @ w["self_attn.kv_b_proj"].T
    k, v = heads_of(up, dim + value).split([dim, value], -1)
    base = c["rope_theta"]
    q = torch.cat([q[..., :dim], turned(q[..., dim:], base, neighbours=True)], -1)
    shared = turned(shared[:, None], base, neighbours=True).expand(-1, HEADS, -1)
    out = attend(q, torch.cat([k, shared], -1), v, (dim + turns) ** -0.5)
    return out.flatten(1) @ w["self_attn.o_proj"].T


def _logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, sandwich = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["sandwich_norm"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        w = {k.removeprefix(at).removesuffix(".weight"): v for k, v in t.items() if k.startswith(at)}
        out = _attention(c, rms(x, w["input_layernorm"], eps), w)
        x = x + (rms(out, w["post_attention_layernorm"], eps) if sandwich else out)
        y = rms(x, w["pre_mlp_layernorm" if sandwich else "post_attention_layernorm"], eps)
        out = _feed(y, w, "mlp") if i < c["num_dense_layers"] else _experts(c, y, w)
        x = x + (rms(out, w["post_mlp_layernorm"], eps) if sandwich else out)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


PANGU = OlderFamily(CONFIG, _shapes, _logits)
