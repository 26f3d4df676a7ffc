"""More families that transformers lacks and llama.cpp has, written down plainly as in `older_oracles`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
    INNER,
    OLDER,
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
from tests.families.small_oracles import SMALL

Shapes = dict[str, tuple[int, ...]]
HEADS, KV, DIM = 6, 2, SIZE // 6
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}


def _ends(tied: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    if not tied:
        yield "lm_head.weight", (VOCAB, SIZE)


def _layers(
    c: Config, sizes: Shapes, at: str = "model.layers.{i}.", end: str = ".weight"
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for i in range(c["num_hidden_layers"]):
        yield from ((f"{at.format(i=i)}{name}{end}", shape) for name, shape in sizes.items())


def _attention(dim: int = DIM, kv: int = KV) -> Shapes:
    rows = {"q": HEADS * dim, "k": kv * dim, "v": kv * dim}
    sizes: Shapes = {f"self_attn.{x}_proj": (n, SIZE) for x, n in rows.items()}
    return {**sizes, "self_attn.o_proj": (SIZE, HEADS * dim)}


def _experts(at: str, words: tuple[str, str, str], count: int, size: int) -> Shapes:
    """`words`: of gate, down and up."""
    gate, down, up = words
    shapes = ((gate, (size, SIZE)), (down, (SIZE, size)), (up, (size, SIZE)))
    return {f"{at}.{e}.{word}": shape for e in range(count) for word, shape in shapes}


def _of_layer(t: Tensors, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in t.items() if k.startswith(prefix)}


def _expert(
    x: Tensor, w: Tensors, at: str, words: tuple[str, str, str], act: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    gate, down, up = (w[f"{at}.{word}"] for word in words)
    return act(x @ gate.T, x @ up.T) @ down.T


def _glu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _mix(x: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """x: [T, n], weights: [T, E], 0 of those that are not chosen."""
    return torch.stack([weights[:, e, None] * expert(e, x) for e in range(weights.shape[1])]).sum(0)


def _choose(logits: Tensor, k: int, scores: Tensor) -> Tensor:
    """The scores of the best k, which sum to one, and 0 for the others."""
    kept = torch.zeros_like(scores).scatter(-1, logits.topk(k, -1).indices, 1.0) * scores
    return kept / kept.sum(-1, keepdim=True)


W123 = ("w1", "w2", "w3")
PROJECTIONS = ("gate_proj", "down_proj", "up_proj")


def _arctic_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts = _experts("block_sparse_moe.experts", W123, c["num_local_experts"], c["intermediate_size"])
    norms = {f"{x}_layernorm": (SIZE,) for x in ("input", "post_attention", "residual")}
    narrow = {f"residual_mlp.{w}": (SIZE, SIZE) for w in W123}
    router = {"block_sparse_moe.gate": (c["num_local_experts"], SIZE)}
    yield from _ends()
    yield from _layers(c, {**norms, **_attention(), **narrow, **router, **experts})


def _arctic_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        q, k, v = _qkv(rms(x, w["input_layernorm"], eps), w)
        after = x + attend(turned(q), turned(k), v, DIM**-0.5).flatten(1) @ w["self_attn.o_proj"].T
        read = rms(x, w["post_attention_layernorm"], eps)
        logits = read @ w["block_sparse_moe.gate"].T
        by = _choose(logits, c["num_experts_per_tok"], logits.softmax(-1))
        experts = _mix(read, by, _experts_of(w, "block_sparse_moe.experts", W123, _glu))
        narrow = _expert(rms(after, w["residual_layernorm"], eps), w, "residual_mlp", W123, _glu)
        x = after + narrow + experts
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _qkv(x: Tensor, w: Tensors, dim: int = DIM) -> list[Tensor]:
    return [heads_of(x @ w[f"self_attn.{name}_proj"].T, dim) for name in "qkv"]


def _experts_of(
    w: Tensors, at: str, words: tuple[str, str, str], act: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[int, Tensor], Tensor]:
    return lambda e, x: _expert(x, w, f"{at}.{e}", words, act)


def _grok_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    count, moe = c["num_local_experts"], "block_sparse_moe"
    norms = {f"{x}_norm": (SIZE,) for x in ("pre_attn", "post_attn", "pre_moe", "post_moe")}
    experts = _experts(f"{moe}.experts", W123, count, c["moe_intermediate_size"])
    dense = {f"mlp.{x}_proj": (INNER, SIZE) for x in ("gate", "up")} | {"mlp.down_proj": (SIZE, INNER)}
    dense = dense if c["residual_moe"] else {}
    yield from _ends()
    yield from _layers(c, {**norms, **_attention(), f"{moe}.gate": (count, SIZE), **dense, **experts})


def _grok_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    def act(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up

    def capped(x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    x, eps = t["model.embed_tokens.weight"][ids] * c["embedding_multiplier_scale"], c["rms_norm_eps"]
    ahead = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        q, k, v = _qkv(rms(x, w["pre_attn_norm"], eps), w)
        k, v = (part.repeat_interleave(HEADS // KV, 1) for part in (turned(k), v))
        scores = torch.einsum("nhd,mhd->hnm", turned(q), k) * c["attn_output_multiplier"]
        scores = capped(scores, c["attn_logit_softcapping"]).masked_fill(ahead, -torch.inf)
        out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1) @ w["self_attn.o_proj"].T
        x = x + rms(out, w["post_attn_norm"], eps)
        y = rms(x, w["pre_moe_norm"], eps)
        logits = capped(y @ w["block_sparse_moe.gate"].T, c["router_logit_softcapping"])
        by = _choose(logits, c["num_experts_per_tok"], logits.softmax(-1))
        made = _mix(y, by, _experts_of(w, "block_sparse_moe.experts", W123, act))
        if c["residual_moe"]:
            made = (_expert(y, w, "mlp", PROJECTIONS, act) + made) / 2**0.5
        x = x + rms(made, w["post_moe_norm"], eps)
    logits = rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T * c["output_multiplier_scale"]
    return capped(logits, c["final_logit_softcapping"])


def _smallthinker_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    count, moe = c["moe_num_primary_experts"], "block_sparse_moe"
    experts = _experts(f"{moe}.experts", ("gate", "down", "up"), count, c["moe_ffn_hidden_size"])
    norms = {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,)}
    attention = _attention(c["head_dim"])
    yield from _ends()
    yield from _layers(c, {**norms, **attention, f"{moe}.primary_router": (count, SIZE), **experts})


def _smallthinker_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["head_dim"]
    softmax = c["moe_primary_router_apply_softmax"]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        logits = x @ w["block_sparse_moe.primary_router"].T
        q, k, v = _qkv(rms(x, w["input_layernorm"], eps), w, dim)
        if c["rope_layout"][i]:
            q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
        window = c["sliding_window_size"] if c["sliding_window_layout"][i] else None
        x = x + attend(q, k, v, dim**-0.5, window=window).flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        by = _choose(logits, c["moe_num_active_primary_experts"], scores)
        words = ("gate", "down", "up")
        x = x + _mix(y, by, _experts_of(w, "block_sparse_moe.experts", words, lambda a, b: F.relu(a) * b))
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _qwen_shapes(c: Config, more: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, count = c["head_dim"], c["num_experts"]
    norms = {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,)}
    norms |= {f"self_attn.{x}_norm": (dim,) for x in "qk"}
    experts = _experts("mlp.experts", PROJECTIONS, count, c["moe_intermediate_size"])
    yield from _ends()
    yield from _layers(c, {**norms, **_attention(dim), "mlp.gate": (count, SIZE), **experts, **more})


def _grove_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    return _qwen_shapes(c, _experts("mlp.chunk_experts", PROJECTIONS, c["num_experts"] // 2, c["head_dim"]))


def _qwen_logits(
    c: Config, t: Tensors, ids: Tensor, feed: Callable[[Tensor, Tensor, Tensors], Tensor]
) -> Tensor:
    """`feed`: of what experts read, their weights, and the layer."""
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["head_dim"]
    for i, kind in enumerate(c["layer_types"]):
        w = _of_layer(t, f"model.layers.{i}.")
        q, k, v = _qkv(rms(x, w["input_layernorm"], eps), w, dim)
        q, k = (rms(part, w[f"self_attn.{x}_norm"], eps) for part, x in ((q, "q"), (k, "k")))
        share, window = c.get("partial_rotary_factor", 1.0), None
        if kind == "sliding_attention" or not c.get("nope_on_global_attention"):
            q, k = (turned(part, c["rope_theta"], dim=int(dim * share)) for part in (q, k))
        window = c["sliding_window"] if kind == "sliding_attention" else None
        x = x + attend(q, k, v, dim**-0.5, window=window).flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        logits = y @ w["mlp.gate"].T
        x = x + feed(y, _choose(logits, c["num_experts_per_tok"], logits.softmax(-1)), w)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _grove_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    def feed(y: Tensor, by: Tensor, w: Tensors) -> Tensor:
        each = _experts_of(w, "mlp.experts", PROJECTIONS, _glu)
        common = _experts_of(w, "mlp.chunk_experts", PROJECTIONS, _glu)
        return _mix(y, by, lambda e, x: each(e, x) + 0.05 * common(e // 2, x))

    return _qwen_logits(c, t, ids, feed)


def _maple_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    def act(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)

    return _qwen_logits(
        c, t, ids, lambda y, by, w: _mix(y, by, _experts_of(w, "mlp.experts", PROJECTIONS, act))
    )


def _plamo_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    mlp = {f"mlp.{x}_proj": (INNER, SIZE) for x in ("gate", "up")} | {"mlp.down_proj": (SIZE, INNER)}
    yield from _ends()
    sizes = {"norm": (SIZE,), **_attention(kv=HEADS // c["n_shared_head"]), **mlp}
    yield from _layers(c, sizes, "model.layers.layers.{i}.")


def _plamo_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, shared = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["n_shared_head"]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.layers.{i}.")
        y = rms(x, w["norm"], eps)
        q, k, v = _qkv(y, w)
        k, v = (part.repeat(1, shared, 1) for part in (turned(k), v))  # heads take them in turn
        out = attend(turned(q), k, v, DIM**-0.5).flatten(1) @ w["self_attn.o_proj"].T
        x = x + out + _expert(y, w, "mlp", PROJECTIONS, _glu)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _talkie_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("model.embed.weight", (VOCAB, SIZE)), ("lm_head.weight", (VOCAB, SIZE)))
    yield "lm_head_gain.w_g", (1,)
    sizes: Shapes = {f"attn.attn_{x}": (SIZE, SIZE) for x in ("query", "key", "value", "resid")}
    sizes |= {f"mlp.mlp_{x}": (INNER, SIZE) for x in ("gate", "linear")} | {"mlp.mlp_resid": (SIZE, INNER)}
    yield from _layers(c, sizes, "model.blocks.{i}.")
    gains: Shapes = {"attn.head_gain.head_g": (HEADS,), "attn_gain.a_g": (1,)}
    gains |= {"mlp_gain.a_g": (1,), "embed_skip.a_g": (1,)}
    yield from _layers(c, gains, "model.blocks.{i}.", "")


def _talkie_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)

    def back(x: Tensor) -> Tensor:
        """Turned the other way round: what is turned has its second half negated, before and after."""
        signs = torch.ones(DIM, dtype=x.dtype)
        signs[DIM // 2 :] = -1
        return turned(x * signs, c["rope_theta"]) * signs

    first = x = unit(t["model.embed.weight"][ids])
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.blocks.{i}.")
        y = unit(x)
        q, k, v = (heads_of(y @ w[f"attn.attn_{name}"].T, DIM) for name in ("query", "key", "value"))
        q = unit(back(q)) * w["attn.head_gain.head_g"][:, None]
        out = attend(q, unit(back(k)), v, DIM**-0.5).flatten(1) @ w["attn.attn_resid"].T
        x = x + w["attn_gain.a_g"] * out
        y = unit(x)
        mlp = _glu(y @ w["mlp.mlp_gate"].T, y @ w["mlp.mlp_linear"].T) @ w["mlp.mlp_resid"].T
        x = x + w["mlp_gain.a_g"] * mlp + w["embed_skip.a_g"] * first
    return unit(x) @ t["lm_head.weight"].T * t["lm_head_gain.w_g"]


ARCTIC: Config = {
    **USUAL, "architectures": ["ArcticForCausalLM"], "model_type": "arctic", "hidden_act": "silu",
    "num_local_experts": 5, "num_experts_per_tok": 2, "moe_layer_frequency": 1,
    "parallel_attn_mlp_res": True, "use_residual": True, "rope_theta": 1e4,
}  # fmt: skip
GROK: Config = {
    **USUAL, "architectures": ["Grok1ForCausalLM"], "model_type": "git", "num_local_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "embedding_multiplier_scale": 3.0,
    "output_multiplier_scale": 0.5, "attn_output_multiplier": 0.3, "attn_logit_softcapping": 1.5,
    "router_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "residual_moe": True, "rope_theta": 1e4,
}  # fmt: skip
SMALLTHINKER: Config = {
    **USUAL, "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "head_dim": 8,
    "num_hidden_layers": 5, "moe_num_primary_experts": 6, "moe_num_active_primary_experts": 3,
    "moe_ffn_hidden_size": 20, "moe_primary_router_apply_softmax": False, "rope_theta": 1e4,
    "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0], "sliding_window_size": 6,
}  # fmt: skip
GROVE: Config = {
    **USUAL, **EXPERTS, "architectures": ["GroveMoeForCausalLM"], "model_type": "grove_moe", "head_dim": 8,
    "hidden_act": "silu", "layer_types": ["full_attention"] * 3, "rope_theta": 1e4, "norm_topk_prob": True,
}  # fmt: skip
MAPLE: Config = {
    **USUAL, **EXPERTS, "architectures": ["MapleForCausalLM"], "model_type": "maple", "head_dim": 8,
    "hidden_act": "silu", "num_hidden_layers": 4, "sliding_window": 6, "partial_rotary_factor": 0.5,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"], "rope_theta": 1e4, "use_qk_norm": True,
    "nope_on_global_attention": True, "norm_topk_prob": True, "num_shared_experts": 0,
}  # fmt: skip
PLAMO: Config = {
    **USUAL, "architectures": ["PlamoForCausalLM"], "model_type": "plamo", "n_shared_head": 2,
    "num_key_value_heads": HEADS, "max_position_embeddings": 4096,
}  # fmt: skip
TALKIE: Config = {
    **USUAL, "architectures": ["TalkieForCausalLM"], "model_type": "talkie", "num_key_value_heads": HEADS,
    "head_dim": DIM, "rope_theta": 1e4, "rms_norm_eps": torch.finfo(torch.float32).eps,
}  # fmt: skip
NEWER: Mapping[str, OlderFamily] = {
    "arctic": OlderFamily(ARCTIC, _arctic_shapes, _arctic_logits),
    "grok": OlderFamily(GROK, _grok_shapes, _grok_logits),
    "smallthinker": OlderFamily(SMALLTHINKER, _smallthinker_shapes, _smallthinker_logits),
    "grove_moe": OlderFamily(GROVE, _grove_shapes, _grove_logits),
    "maple": OlderFamily(MAPLE, lambda c: _qwen_shapes(c, {}), _maple_logits),
    "plamo": OlderFamily(PLAMO, _plamo_shapes, _plamo_logits),
    "talkie": OlderFamily(TALKIE, _talkie_shapes, _talkie_logits),
}
DESCRIBED = {**OLDER, **NEWER, **SMALL}
