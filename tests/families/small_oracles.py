"""IQuest Q1 and small families that transformers lacks, written down plainly as in `older_oracles`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    heads_of,
    rms,
    turned,
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]
KV, DIM, EXPERTS = 2, 8, 6


def _ends() -> Shapes:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    yield "lm_head.weight", (VOCAB, SIZE)


def _attention(at: str, dim: int = DIM) -> Shapes:
    rows = {"q": HEADS * dim, "k": KV * dim, "v": KV * dim}
    yield from ((f"{at}.{x}_proj.weight", (n, SIZE)) for x, n in rows.items())
    yield f"{at}.o_proj.weight", (SIZE, HEADS * dim)


def _mlp(at: str, inner: int = INNER) -> Shapes:
    yield from ((f"{at}.{x}_proj.weight", (inner, SIZE)) for x in ("gate", "up"))
    yield f"{at}.down_proj.weight", (SIZE, inner)


def _of_layer(t: Tensors, i: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{i}."
    return {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in t.items() if k.startswith(prefix)}


def _project(x: Tensor, w: Tensors, at: str, dim: int = DIM) -> list[Tensor]:
    return [heads_of(x @ w[f"{at}.{name}_proj"].T, dim) for name in "qkv"]


def _near(count: int, window: int) -> Tensor:
    """Which keys each of `count` queries sees: of the last `window` positions, itself included."""
    behind = torch.arange(count)[:, None] - torch.arange(count)
    return (behind >= 0) & (behind < window)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """q [T, H, d], k and v [keys, Hk, d], seen [T, keys]: [T, H, d]."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _feed(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate, up = (x @ w[f"{at}.{name}_proj"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ w[f"{at}.down_proj"].T


def _weigh(logits: Tensor, k: int) -> Tensor:
    """Of softmax's scores the best k, which sum to one, and 0 for the others: [T, E]."""
    scores = logits.softmax(-1)
    kept = torch.zeros_like(scores).scatter(-1, logits.topk(k, -1).indices, 1.0) * scores
    return kept / kept.sum(-1, keepdim=True)


def _q1_shapes(c: Config) -> Shapes:
    yield from _ends()
    size = c["intermediate_size"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        norms = ["attention_norm", "attn_out_norm", "feed_forward_norm", *["ffn_out_norm"] * (i == 0)]
        yield from ((f"{at}.{name}.weight", (SIZE,)) for name in norms)
        yield from _attention(f"{at}.self_attn")
        yield from ((f"{at}.self_attn.{x}_norm.weight", (DIM,)) for x in "qk")
        if c["enable_sink_attention"]:
            yield f"{at}.self_attn.sink_k", (1, KV, DIM)
        if i in c["mlp_only_layers"]:
            yield from _mlp(f"{at}.mlp", c["dense_intermediate_size"])
        else:
            yield f"{at}.mlp.router.weight", (EXPERTS, SIZE)
            yield f"{at}.mlp.experts.fc", (EXPERTS, 2 * size, SIZE)
            yield f"{at}.mlp.experts.proj", (EXPERTS, SIZE, size)


def _q1_experts(c: Config, w: Tensors, x: Tensor) -> Tensor:
    weights = _weigh(x @ w["mlp.router"].T, c["num_experts_per_tok"])
    gate, up = torch.einsum("tn,emn->etm", x, w["mlp.experts.fc"]).chunk(2, -1)
    each = torch.einsum("etm,enm->etn", F.silu(gate) * up, w["mlp.experts.proj"])
    return torch.einsum("etn,te->tn", each, weights)


def _q1_attend(c: Config, w: Tensors, x: Tensor, i: int, kind: str) -> Tensor:
    """The learned key is one more key, in front of all and within every window, with the value 0."""
    near = kind == "sliding_attention"
    q, k, v = _project(x, w, "self_attn")
    q, k = (rms(part, w[f"self_attn.{name}_norm"], c["rms_norm_eps"]) for part, name in ((q, "q"), (k, "k")))
    if i not in c["no_rope_layers"]:
        base = c["swa_rope_theta"] if near else c["rope_theta"]
        q, k = (turned(part, base, dim=c["rotary_dim"]) for part in (q, k))
    scale = DIM**-0.5 if c["softmax_scale"] is None else c["softmax_scale"]
    seen = _near(len(q), c["sliding_window"] if near else len(q))
    if c["enable_sink_attention"]:
        k, v = torch.cat([k, w["self_attn.sink_k"]]), torch.cat([v, torch.zeros_like(v[:1])])
        seen = torch.cat([seen, seen.new_ones(len(q), 1)], 1)
    out = _attend(q, k, v, scale, seen)
    return out.flatten(1) @ w["self_attn.o_proj"].T


def _q1_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    block = c["hybrid_layers_types_block"] * c["num_hybrid_layers_block"]
    for i, kind in enumerate([*c["first_layers_types"], *block, *c["last_layers_types"]]):
        w, first = _of_layer(t, i), "first_layer_" * (i == 0)
        read = rms(x, w["attention_norm"], eps)
        x = x if first else read
        out = _q1_attend(c, w, read, i, kind)
        x = x + c[f"{first}attn_out_scale"] * rms(out, w["attn_out_norm"], eps)
        read = rms(x, w["feed_forward_norm"], eps)
        out = _feed(read, w, "mlp") if i in c["mlp_only_layers"] else _q1_experts(c, w, read)
        x = x + c[f"{first}ffn_out_scale"] * (rms(out, w["ffn_out_norm"], eps) if first else out)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T * c["logit_scale"]


def _domyn_shapes(c: Config) -> Shapes:
    yield from _ends()
    for i, own in enumerate(c["per_layer_config"]):
        at = f"model.layers.{i}"
        sides = [f"{x}_{y}_norm" for x in ("pre", "post") for y in ("attention", "feedforward")]
        yield from ((f"{at}.{name}.weight", (SIZE,)) for name in sides)
        yield from _attention(f"{at}.attention", own["head_dim"])
        yield f"{at}.attention.k_norm.weight", (own["head_dim"],)
        yield from _mlp(f"{at}.feedforward")


def _domyn_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for i, own in enumerate(c["per_layer_config"]):
        w, dim, window = _of_layer(t, i), own["head_dim"], c["window_sizes"][i][0]
        q, k, v = _project(rms(x, w["pre_attention_norm"], eps), w, "attention", dim)
        q, k = rms(q, torch.ones(dim), eps), rms(k, w["attention.k_norm"], eps)
        if c["position_layers"][i] == "rope":
            q, k = (turned(part, c["rope_parameters"]["rope_theta"]) for part in (q, k))
        seen = _near(len(q), window + 1 if window > 0 else len(q))
        out = _attend(q, k, v, dim**-0.5, seen).flatten(1) @ w["attention.o_proj"].T
        x = x + rms(out, w["post_attention_norm"], eps)
        out = _feed(rms(x, w["pre_feedforward_norm"], eps), w, "feedforward")
        x = x + rms(out, w["post_feedforward_norm"], eps)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _rnj_shapes(c: Config) -> Shapes:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        sides = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        yield from ((f"{at}.{name}_layernorm.weight", (SIZE,)) for name in sides)
        yield from _attention(f"{at}.self_attn")
        yield from ((f"{at}.self_attn.{x}_norm.weight", (DIM,)) for x in "qk")
        yield from _mlp(f"{at}.mlp")


def _rnj_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    """Local layers see what is in the block of a query, or in the one before, and not behind it."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, 1 + weight, c["rms_norm_eps"])

    table = t["model.embed_tokens.weight"]
    x, at = table[ids] * SIZE**0.5, torch.arange(len(ids))
    block = at // (c["sliding_window"] // 2)
    for i, kind in enumerate(c["layer_types"]):
        w = _of_layer(t, i)
        q, k, v = _project(norm(x, w["input_layernorm"]), w, "self_attn")
        base = c["rope_parameters"][kind]["rope_theta"]
        q, k = (turned(norm(y, w[f"self_attn.{n}_norm"]), base) for y, n in ((q, "q"), (k, "k")))
        seen = at[:, None] >= at
        if kind == "chunked_attention":
            seen &= block[:, None] - block <= 1
        out = _attend(q, k, v, c["query_pre_attn_scalar"] ** -0.5, seen).flatten(1)
        x = x + norm(out @ w["self_attn.o_proj"].T, w["post_attention_layernorm"])
        y = norm(x, w["pre_feedforward_layernorm"])
        inner = F.gelu(y @ w["mlp.gate_proj"].T, approximate="tanh") * (y @ w["mlp.up_proj"].T)
        x = x + norm(inner @ w["mlp.down_proj"].T, w["post_feedforward_layernorm"])
    cap = c["final_logit_softcapping"]
    return cap * torch.tanh(norm(x, t["model.norm.weight"]) @ table.T / cap)


def _xverse_shapes(c: Config) -> Shapes:
    yield from _ends()
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from ((f"{at}.{name}_layernorm.weight", (SIZE,)) for name in ("input", "post_attention"))
        yield from _attention(f"{at}.self_attn", SIZE // HEADS)
        yield f"{at}.mlp.router.weight", (EXPERTS, SIZE)
        for e in range(EXPERTS):
            yield from _mlp(f"{at}.mlp.experts.{e}", c["intermediate_size"])
        yield from _mlp(f"{at}.mlp.shared_experts", c["num_shared_experts"] * c["intermediate_size"])


def _xverse_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], SIZE // HEADS
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, i)
        q, k, v = _project(rms(x, w["input_layernorm"], eps), w, "self_attn", dim)
        out = _attend(turned(q), turned(k), v, dim**-0.5, _near(len(q), len(q)))
        x = x + out.flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        scores = (y @ w["mlp.router"].T).softmax(-1)
        best, which = scores.topk(c["moe_top_k"], -1)
        by = torch.zeros_like(scores).scatter(-1, which, best)  # which do not sum to one
        x = x + _feed(y, w, "mlp.shared_experts")
        x = x + sum(by[:, e, None] * _feed(y, w, f"mlp.experts.{e}") for e in range(EXPERTS))
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


IQUEST_Q1: Config = {
    **USUAL, "architectures": ["IQuestQ1ForCausalLM"], "model_type": "iquest_q1", "hidden_act": "silu",
    "head_dim": DIM, "rotary_dim": 4, "rope_theta": 1e6, "swa_rope_theta": 1e4, "sliding_window": 6,
    "num_hidden_layers": 5, "first_layers_types": ["full_attention"], "num_hybrid_layers_block": 1,
    "hybrid_layers_types_block": ["full_attention", "sliding_attention", "sliding_attention"],
    "last_layers_types": ["full_attention"], "no_rope_layers": [1, 4], "mlp_only_layers": [0],
    "num_experts": EXPERTS, "num_experts_per_tok": 3, "intermediate_size": 20, "dense_intermediate_size": 28,
    "enable_sink_attention": True, "first_layer_attn_out_scale": 1.3, "first_layer_ffn_out_scale": 0.7,
    "attn_out_scale": 0.9, "ffn_out_scale": 0.54, "softmax_scale": 0.3, "logit_scale": 0.8,
    "moe_router_dtype": "fp32", "enable_lm_head_fp32": True, "attention_bias": False,
}  # fmt: skip
DOMYN_EDGE: Config = {
    **USUAL, "architectures": ["DomynEdgeForCausalLM"], "model_type": "domyn_edge", "hidden_act": "silu",
    "position_layers": ["rope", "nope", "rope"], "window_sizes": [[5, 0], [-1, 0], [9, 0]], "head_dim": DIM,
    "per_layer_config": [{"head_dim": 8}, {"head_dim": 12}, {"head_dim": 8}],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
RNJ1: Config = {
    **USUAL, "architectures": ["Rnj1ForCausalLM"], "model_type": "rnj1", "head_dim": DIM,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 12,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "sliding_window": 10,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "chunked_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip
XVERSE_MOE: Config = {
    **USUAL, "architectures": ["XverseMoeForCausalLM"], "model_type": "xverse", "hidden_act": "silu",
    "num_experts": EXPERTS, "moe_top_k": 3, "num_shared_experts": 2, "intermediate_size": 20,
    "norm_topk_prob": False,
}  # fmt: skip
SMALL: Mapping[str, OlderFamily] = {
    "iquest_q1": OlderFamily(IQUEST_Q1, _q1_shapes, _q1_logits),
    "domyn_edge": OlderFamily(DOMYN_EDGE, _domyn_shapes, _domyn_logits),
    "rnj1": OlderFamily(RNJ1, _rnj_shapes, _rnj_logits),
    "xverse_moe": OlderFamily(XVERSE_MOE, _xverse_shapes, _xverse_logits),
}
