"""Families of 2025 and 2026 that transformers lacks, written down plainly as in `older_oracles`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
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
    slopes,
    turned,
)

Shape = tuple[str, tuple[int, ...]]
HEADS, KV = 6, 2


def _of_layer(t: Tensors, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in t.items() if k.startswith(prefix)}


def _ends() -> Iterator[Shape]:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    yield "lm_head.weight", (VOCAB, SIZE)


def _glu(at: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.{x}_proj": (SIZE, size) if x == "down" else (size, SIZE) for x in ("gate", "up", "down")}


def _run_glu(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate, up, down = (w[f"{at}.{name}_proj"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _horizon_shapes(c: Config) -> Iterator[Shape]:
    dim, count, values = c["head_dim"], c["num_experts"], c["mova_num_experts"]
    size = c["moe_intermediate_size"]
    yield from _ends()
    for i in range(c["num_hidden_layers"]):
        is_sparse, wide = i not in c["mlp_only_layers"], HEADS * dim
        sizes: dict[str, tuple[int, ...]] = {f"{x}_layernorm": (SIZE,) for x in ("input", "post_attention")}
        sizes |= {f"self_attn.{x}_proj": (n * dim, SIZE) for x, n in (("q", HEADS), ("k", KV))}
        sizes |= {"self_attn.o_proj": (SIZE, wide)}
        if c["attention_gate_func"]:
            sizes["self_attn.gate_proj"] = (wide, SIZE)
        if c["query_key_norm"]:
            sizes |= {"self_attn.q_norm": (wide,), "self_attn.k_norm": (KV * dim,)}
        if is_sparse and values:
            sizes |= {f"self_attn.v_experts.{e}": (KV * dim, SIZE) for e in range(values)}
            sizes["self_attn.v_router"] = (values, SIZE)
        else:
            sizes["self_attn.v_proj"] = (KV * dim, SIZE)
        if is_sparse:
            sizes |= {"mlp.gate": (count, SIZE)} | _glu("mlp.shared_experts", c["num_shared_experts"] * size)
            sizes |= {k: v for e in range(count) for k, v in _glu(f"mlp.experts.{e}", size).items()}
        else:
            sizes |= _glu("mlp", INNER)
        for name, shape in sizes.items():
            yield f"model.layers.{i}.{name}.weight", shape
            if name in ("mlp.gate", "self_attn.v_router") or (
                c["attention_bias"] and name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))
            ):
                yield f"model.layers.{i}.{name}.bias", shape[:1]


def _horizon_route(x: Tensor, w: Tensors, at: str, k: int, c: Config) -> Tensor:
    """The weight of each expert, [T, E]: 0 of those that are not chosen."""
    logits = x @ w[at].T
    scores = logits.sigmoid() if c["router_score_func"] == "sigmoid" else logits.softmax(-1)
    best = (scores + w[f"{at}.bias"]).topk(k, -1).indices
    by = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
    return (by / by.sum(-1, keepdim=True) if k > 1 else by) * c["router_scaling_factor"]


def _horizon_turn(x: Tensor, c: Config) -> Tensor:
    """Interleaved, the first `rope_head_dim` numbers of a head turn, as halves of their own."""
    width, half = c["rope_head_dim"] // 2, c["head_dim"] // 2
    a, b = x.split(half, -1)
    both = turned(torch.cat([a[..., :width], b[..., :width]], -1), c["rope_parameters"]["rope_theta"])
    return torch.cat([both[..., :width], a[..., width:], both[..., width:], b[..., width:]], -1)


def _horizon_attend(x: Tensor, w: Tensors, c: Config) -> Tensor:
    dim, taken = c["head_dim"], c["mova_num_experts_per_tok"]

    def project(name: str) -> Tensor:
        at = f"self_attn.{name}_proj"
        return x @ w[at].T + (w[f"{at}.bias"] if c["attention_bias"] else 0.0)

    q, k = heads_of(project("q"), dim), heads_of(project("k"), dim)
    if c["query_key_norm"]:
        sizes = {"q": q.shape[1:], "k": k.shape[1:]}
        q, k = (
            rms(part, w[f"self_attn.{name}_norm"].view(sizes[name]), c["rms_norm_eps"])
            for name, part in (("q", q), ("k", k))
        )
    if "self_attn.v_router" in w:
        by = _horizon_route(x, w, "self_attn.v_router", taken, c)
        experts = [w[f"self_attn.v_experts.{e}"] for e in range(by.shape[1])]
        v = torch.stack([by[:, e, None] * F.silu(x @ m.T) for e, m in enumerate(experts)]).sum(0)
    else:
        v = project("v")
    out = attend(_horizon_turn(q, c), _horizon_turn(k, c), heads_of(v, dim), dim**-0.5).flatten(1)
    match c["attention_gate_func"]:
        case "silu":
            out = out * F.silu(x @ w["self_attn.gate_proj"].T)
        case "softplus":
            out = out * torch.log2(1 + torch.exp2(x @ w["self_attn.gate_proj"].T))
    bias = w["self_attn.o_proj.bias"] if c["attention_bias"] else 0.0
    return out @ w["self_attn.o_proj"].T + bias


def _horizon_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    groups, zero = c["layernorm_num_groups"], c.get("zero", 0.0)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        parts = weight.unflatten(-1, (groups, -1)) + zero
        return rms(x.unflatten(-1, (groups, -1)), parts, c["rms_norm_eps"]).flatten(-2)

    x = t["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        x = x + _horizon_attend(norm(x, w["input_layernorm"]), w, c)
        y = norm(x, w["post_attention_layernorm"])
        if i in c["mlp_only_layers"]:
            x = x + _run_glu(y, w, "mlp")
            continue
        by = _horizon_route(y, w, "mlp.gate", c["num_experts_per_tok"], c)
        found = [by[:, e, None] * _run_glu(y, w, f"mlp.experts.{e}") for e in range(c["num_experts"])]
        x = x + torch.stack(found).sum(0) + _run_glu(y, w, "mlp.shared_experts")
    return norm(x, t["model.norm.weight"]) @ t["lm_head.weight"].T


def _step_shapes(c: Config) -> Iterator[Shape]:
    dim, rank, size = c["head_dim"], c["share_q_dim"], c["moe_intermediate_size"]
    yield from _ends()
    for i in range(c["num_hidden_layers"]):
        sizes: dict[str, tuple[int, ...]] = {f"{x}_layernorm": (SIZE,) for x in ("input", "post_attention")}
        sizes |= {f"self_attn.{x}_proj": (rank if x == "q" else dim, SIZE) for x in "qkv"}
        sizes |= {"self_attn.inter_norm": (rank,), "self_attn.wq": (HEADS * dim, rank)}
        sizes["self_attn.o_proj"] = (SIZE, HEADS * dim)
        if str(i) in c["moe_layers_enum"].split(","):
            stacked = {f"moe.{x}": (c["moe_num_experts"], *shape) for x, shape in _glu("", size).items()}
            sizes |= {name.replace("moe..", "moe."): shape for name, shape in stacked.items()}
            sizes |= {"moe.gate": (c["moe_num_experts"], SIZE)} | _glu("share_expert", c["share_expert_dim"])
        else:
            sizes |= _glu("mlp", INNER)
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in sizes.items())


def _step_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["head_dim"]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        y = rms(x, w["input_layernorm"], eps)
        first, k, v = (y @ w[f"self_attn.{name}_proj"].T for name in "qkv")
        q = rms(first, w["self_attn.inter_norm"], eps) @ w["self_attn.wq"].T
        q, k = (turned(heads_of(part, dim), c["rope_theta"]) for part in (q, k))
        x = x + attend(q, k, heads_of(v, dim), dim**-0.5).flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        if "moe.gate" not in w:
            x = x + _run_glu(y, w, "mlp")
            continue
        scores = (y @ w["moe.gate"].T).softmax(-1)
        best = scores.topk(c["moe_top_k"], -1).indices
        by = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        by = by / by.sum(-1, keepdim=True) if c["norm_expert_weight"] else by
        parts = ("gate_proj", "up_proj", "down_proj")
        experts = [{f"one.{p}": w[f"moe.{p}"][e] for p in parts} for e in range(by.shape[1])]
        found = [by[:, e, None] * _run_glu(y, one, "one") for e, one in enumerate(experts)]
        x = x + torch.stack(found).sum(0) + _run_glu(y, w, "share_expert")
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


STEP3: Config = {
    **{key: value for key, value in USUAL.items() if key != "num_key_value_heads"},
    "architectures": ["Step3TextForCausalLM"], "model_type": "step3_text", "head_dim": 8,
    "num_attention_groups": 1, "share_q_dim": 14, "rope_theta": 5e5, "moe_num_experts": 6, "moe_top_k": 3,
    "moe_intermediate_size": 14, "share_expert_dim": 18, "moe_layers_enum": "1,2", "norm_expert_weight": True,
    "max_seq_len": 128, "max_position_embedding": 128,
}  # fmt: skip


def _root_shapes(c: Config) -> Iterator[Shape]:
    heads, kv = c["num_attention_heads"], c["num_attention_groups"]
    dim = SIZE // heads
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    sizes: dict[str, tuple[int, ...]] = {f"{x}_layernorm": (SIZE,) for x in ("input", "post_attention")}
    rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim, "o": SIZE}
    sizes |= {f"self_attn.{x}_proj": (count, SIZE) for x, count in rows.items()} | _glu("mlp", INNER)
    for i in range(c["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in sizes.items())


def _root_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    heads, table, eps = c["num_attention_heads"], t["model.embed_tokens.weight"], c["rms_norm_eps"]
    dim, at, x = SIZE // heads, torch.arange(len(ids)), table[ids]
    behind = (at[:, None] - at).double()
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        y = rms(x, w["input_layernorm"], eps)
        q, k, v = (heads_of(y @ w[f"self_attn.{name}_proj"].T, dim) for name in "qkv")
        k, v = (part.repeat_interleave(heads // c["num_attention_groups"], 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * dim**-0.5
        scores = scores - slopes(heads)[:, None, None] * behind.clamp(min=0).sqrt()
        scores = scores.masked_fill(behind < 0, -torch.inf)
        out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1)
        x = x + out @ w["self_attn.o_proj"].T
        x = x + _run_glu(rms(x, w["post_attention_layernorm"], eps), w, "mlp")
    return rms(x, t["model.norm.weight"], eps) @ table.T


ABSENT = ("num_key_value_heads", "tie_word_embeddings")
STEP1: Config = {
    **{key: value for key, value in USUAL.items() if key not in ABSENT},
    "architectures": ["Step1ForCausalLM"], "model_type": "step1", "num_attention_groups": 2,
}  # fmt: skip
HORIZON: Config = {
    **USUAL, "architectures": ["K2HorizonForCausalLM"], "model_type": "k2_horizon", "head_dim": 8,
    "rope_head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "layernorm_num_groups": 3, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2,
    "moe_intermediate_size": 14, "moe_gate_bias": True, "router_score_func": "sigmoid",
    "router_scaling_factor": 1.7, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    "mova_num_experts": 5, "mova_num_experts_per_tok": 2, "attention_gate_func": "softplus",
    "query_key_norm": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
LATEST: Mapping[str, OlderFamily] = {
    "k2_horizon": OlderFamily(HORIZON, _horizon_shapes, _horizon_logits),
    "step1": OlderFamily(STEP1, _root_shapes, _root_logits),
    "step3": OlderFamily(STEP3, _step_shapes, _step_logits),
}
