"""Hybrids of the delta rule that transformers lacks, written down plainly as in `older_oracles`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
    SIZE,
    VOCAB,
    Config,
    OlderFamily,
    Tensors,
    attend,
    heads_of,
    rms,
    turned,
)

Shapes = dict[str, tuple[int, ...]]
TAPS, EPS = 4, 1e-5
CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight", "enorm.weight")
CENTRED += ("hnorm.weight", "shared_head.norm.weight")
EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 3, "norm_topk_prob": True}
ENDS: Config = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "rms_norm_eps": EPS, "hidden_act": "silu",
    "tie_word_embeddings": False, "max_position_embeddings": 128,
}  # fmt: skip


class Hybrid(OlderFamily):
    """Norms of which 1 + w is the weight have numbers around 0."""

    __slots__ = ()

    def checkpoint(self, config: Config | None = None) -> dict[str, Tensor]:
        made = OlderFamily.checkpoint(self, config)
        return {name: w - float(name.endswith(CENTRED)) for name, w in made.items()}


def _below(t: Tensors, at: str) -> dict[str, Tensor]:
    """The tensors with names that begin so, by what follows."""
    return {key.removeprefix(at): w for key, w in t.items() if key.startswith(at)}


def _mlp_shapes(at: str, size: int) -> Shapes:
    shapes: Shapes = {f"{at}.{x}_proj.weight": (size, SIZE) for x in ("gate", "up")}
    return {**shapes, f"{at}.down_proj.weight": (SIZE, size)}


def _mlp(w: Tensors, at: str, x: Tensor, limit: float = torch.inf) -> Tensor:
    gate, up = (x @ w[f"{at}.{name}_proj.weight"].T for name in ("gate", "up"))
    inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return inner @ w[f"{at}.down_proj.weight"].T


def _route(w: Tensors, x: Tensor, count: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What experts give, chosen by sigmoids with a bias, weighed by those without it."""
    scores, out = (x @ w["mlp.gate.weight"].T).sigmoid(), torch.zeros_like(x)
    for row, s in enumerate(scores):
        chosen = (s + w["mlp.gate.e_score_correction_bias"]).topk(count).indices
        for e in chosen.tolist():
            out[row] += s[e] / s[chosen].sum() * expert(e, x[row])
    return out


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """x: [T, C], kernel: [C, 1, taps]: SiLU of sums over the last tokens."""
    before = torch.cat([x.new_zeros(TAPS - 1, x.shape[1]), x])
    return F.silu(sum(before[k : k + len(x)] * kernel[:, 0, k] for k in range(TAPS)))


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """q, k: [T, H, K], v: [T, H, V], decay: logs, [T, H, K] or [T, H, 1], beta: [T, H] -> [T, H, V]."""
    q, k = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (q, k))
    state, out = v.new_zeros(*k.shape[1:], v.shape[-1]), torch.empty_like(v)
    for n in range(len(v)):
        state = state * decay[n].exp()[:, :, None]
        missed = beta[n][:, None] * (v[n] - torch.einsum("hk,hkv->hv", k[n], state))
        state = state + torch.einsum("hk,hv->hkv", k[n], missed)
        out[n] = torch.einsum("hk,hkv->hv", q[n], state) * k.shape[-1] ** -0.5
    return out


# Alice AI: Kimi Delta Attention and Qwen3-Next's attention; a branch reads a mean over blocks of two layers.
KDA_HEADS, KDA_DIM = 3, 10
ALICE: Config = {
    **ENDS, **EXPERTS, "architectures": ["AliceAIForCausalLM"], "model_type": "alice_ai",
    "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": KDA_HEADS, "linear_num_value_heads": KDA_HEADS, "linear_key_head_dim": KDA_DIM,
    "linear_value_head_dim": KDA_DIM, "linear_conv_kernel_dim": TAPS, "num_experts": 6,
    "shared_expert_intermediate_size": 24, "block_attn_res_block_size": 2, "mtp_num_hidden_layers": 0,
    "kda_allow_negative_eigenvalues": False, "router_score_function": "sigmoid",
    "router_bias_correction": True,
}  # fmt: skip
ALICE["layer_types"] = ALICE["layer_types"][:5]


def _alice_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    yield from (("lm_head.weight", (VOCAB, SIZE)), ("model.attnres_final.res_norm_weight", (SIZE,)))
    yield "model.attnres_final.res_proj.weight", (1, SIZE)
    wide, heads, dim = KDA_HEADS * KDA_DIM, c["num_attention_heads"], c["head_dim"]
    linear: Shapes = {
        **{f"{x}_proj.weight": (wide, SIZE) for x in "qkv"},
        **{f"{x}_conv1d.weight": (wide, 1, TAPS) for x in "qkv"},
        **{f"{x}_a_proj.weight": (KDA_DIM, SIZE) for x in "fg"},
        **{f"{x}_b_proj.weight": (wide, KDA_DIM) for x in "fg"},
    }
    linear |= {"b_proj.weight": (KDA_HEADS, SIZE), "a_log_bias": (KDA_HEADS,), "dt_bias": (wide,)}
    linear |= {"o_norm.weight": (KDA_DIM,), "o_proj.weight": (SIZE, wide)}
    attention: Shapes = {
        "q_proj.weight": (2 * heads * dim, SIZE),
        "o_proj.weight": (SIZE, heads * dim),
        **{f"{x}_proj.weight": (c["num_key_value_heads"] * dim, SIZE) for x in "kv"},
        **{f"{x}_norm.weight": (dim,) for x in "qk"},
    }
    count, shared = c["num_experts"], c["shared_expert_intermediate_size"]
    rest: Shapes = {
        **{f"{x}_layernorm.weight": (SIZE,) for x in ("input", "post_attention")},
        "mlp.gate.weight": (count, SIZE),
        "mlp.gate.e_score_correction_bias": (count,),
        **(_mlp_shapes("mlp.shared_expert", shared) if shared else {}),
        **({"mlp.shared_expert_gate.weight": (1, SIZE)} if shared else {}),
    }
    for e in range(count):
        rest |= _mlp_shapes(f"mlp.experts.{e}", c["moe_intermediate_size"])
    for i, kind in enumerate(c["layer_types"]):
        own, at = ("linear_attn", linear) if kind == "linear_attention" else ("self_attn", attention)
        means = ("attn_res", "mlp_res") if i else ("mlp_res",)
        scores: Shapes = {f"{x}_norm_weight": (SIZE,) for x in means}
        scores |= {f"{x}_proj.weight": (1, SIZE) for x in means}
        mixer = {f"{own}.{name}": shape for name, shape in at.items()}
        yield from ((f"model.layers.{i}.{n}", shape) for n, shape in {**mixer, **rest, **scores}.items())


def _kda(w: Tensors, x: Tensor) -> Tensor:
    q, k, v = (
        heads_of(_convolve(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]), KDA_DIM) for n in "qkv"
    )
    steps = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]
    decay = -w["a_log_bias"].exp()[:, None] * F.softplus(heads_of(steps, KDA_DIM))
    out = _delta_rule(q, k, v, decay, (x @ w["b_proj.weight"].T).sigmoid())
    gate = heads_of(x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T, KDA_DIM).sigmoid()
    return (rms(out, w["o_norm.weight"], EPS) * gate).flatten(1) @ w["o_proj.weight"].T


def _gated_attention(c: Config, w: Tensors, x: Tensor) -> Tensor:
    dim, turns = c["head_dim"], c["rope_parameters"]
    q, gate = heads_of(x @ w["q_proj.weight"].T, 2 * dim).chunk(2, -1)
    k, v = (heads_of(x @ w[f"{n}_proj.weight"].T, dim) for n in "kv")
    width = int(dim * turns["partial_rotary_factor"])
    q, k = (
        turned(rms(m, 1 + w[f"{n}_norm.weight"], EPS), turns["rope_theta"], dim=width)
        for n, m in (("q", q), ("k", k))
    )
    return (attend(q, k, v, dim**-0.5) * gate.sigmoid()).flatten(1) @ w["o_proj.weight"].T


def _alice_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    def mean(sources: list[Tensor], at: str) -> Tensor:
        values = torch.stack(sources, 1)
        scores = rms(values, t[f"{at}_norm_weight"], EPS) @ t[f"{at}_proj.weight"][0]
        return (scores.softmax(-1)[..., None] * values).sum(1)

    blocks, part = [t["model.embed_tokens.weight"][ids]], None
    for i, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{i}."
        if i and i % c["block_attn_res_block_size"] == 0 and part is not None:
            blocks, part = [*blocks, part], None
        sources = blocks if part is None else [*blocks, part]
        h = mean(sources, f"{at}attn_res") if i else blocks[0]
        h = rms(h, 1 + t[f"{at}input_layernorm.weight"], EPS)
        if kind == "linear_attention":
            y = _kda(_below(t, f"{at}linear_attn."), h)
        else:
            y = _gated_attention(c, _below(t, f"{at}self_attn."), h)
        part = y if part is None else part + y
        h = rms(mean([*blocks, part], f"{at}mlp_res"), 1 + t[f"{at}post_attention_layernorm.weight"], EPS)
        part = part + _alice_experts(c, _below(t, at), h)
    assert part is not None
    last = mean([*blocks, part], "model.attnres_final.res")
    return rms(last, 1 + t["model.norm.weight"], EPS) @ t["lm_head.weight"].T


def _alice_experts(c: Config, w: Tensors, h: Tensor) -> Tensor:
    out = _route(w, h, c["num_experts_per_tok"], lambda e, x: _mlp(w, f"mlp.experts.{e}", x))
    if not c["shared_expert_intermediate_size"]:
        return out
    return out + _mlp(w, "mlp.shared_expert", h) * (h @ w["mlp.shared_expert_gate.weight"].T).sigmoid()


# GigaChat 3.5: Qwen3-Next's DeltaNet and DeepSeek's attention, with norms that have gates.
RANK, KEYS, VALUES = 16, 2, 4
GIGACHAT: Config = {
    **ENDS, **EXPERTS, "architectures": ["GigaChat35ForCausalLM"], "model_type": "gigachat3_5",
    "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 44,
    "layer_types": ["linear_attention", "attention", "linear_attention", "attention"], "rope_theta": 1e5,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": TAPS, "linear_sigmoid_gate_scale": 2.0,
    "linear_gating_type": "zero_centered_sigmoid", "output_gate_type": "sigmoid",
    "norm_type": "ZeroCenteredGatedNorm", "layernorm_type": "pre_post", "layernorm_gating_weight": 1.6,
    "gated_attention": True, "use_mla_scaling_factor": True, "swiglu_limit": 7.0, "n_group": 1,
    "topk_group": 1, "num_nextn_predict_layers": 1, "nextn_is_sparse": False,
}  # fmt: skip


def _giga_layer(c: Config, kind: str, sparse: bool) -> Shapes:
    norms, made = _giga_norms(c), dict[str, tuple[int, ...]]()
    heads, nope, turns = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    if kind == "linear_attention":
        keys, values = KEYS * c["linear_key_head_dim"], VALUES * c["linear_value_head_dim"]
        made |= {"in_proj_qkvz.weight": (2 * (keys + values), SIZE), "in_proj_ba.weight": (2 * VALUES, SIZE)}
        made |= {"conv1d.weight": (2 * keys + values, 1, TAPS), "out_proj.weight": (SIZE, values)}
        made |= {"A_log": (VALUES,), "dt_bias": (VALUES,), "norm.weight": (c["linear_value_head_dim"],)}
    else:
        rank, kv = c["q_lora_rank"], c["kv_lora_rank"]
        made |= {"q_a_proj.weight": (rank, SIZE)} if rank else {}
        made |= {"q_b_proj.weight" if rank else "q_proj.weight": (heads * (nope + turns), rank or SIZE)}
        made |= {"kv_a_proj_with_mqa.weight": (kv + turns, SIZE)}
        made |= {"kv_b_proj.weight": (heads * (nope + c["v_head_dim"]), kv)}
        made |= {"o_proj.weight": (SIZE, heads * c["v_head_dim"])}
        made |= norms("kv_a_layernorm", kv) | (norms("q_a_layernorm", rank) if rank else {})
        made |= {"gate_proj.weight": (heads * c["v_head_dim"], SIZE)} if c["gated_attention"] else {}
    rest: Shapes = {f"self_attn.{name}": shape for name, shape in made.items()}
    words = ("input", "post_attention") if c["layernorm_type"] != "post" else ()
    words += ("post_self_attn", "post_feedforward") if c["layernorm_type"] != "pre" else ()
    for word in words:
        rest |= norms(f"{word}_layernorm", SIZE)
    if not sparse:
        return rest | _mlp_shapes("mlp", c["intermediate_size"])
    size, count = c["moe_intermediate_size"], c["n_routed_experts"]
    rest |= {"mlp.gate.weight": (count, SIZE), "mlp.gate.e_score_correction_bias": (count,)}
    for e in range(count):
        rest |= _mlp_shapes(f"mlp.experts.{e}", size)
    return rest | _mlp_shapes("mlp.shared_experts", size * c["n_shared_experts"])


def _giga_norms(c: Config) -> Callable[[str, int], Shapes]:
    def shapes(at: str, size: int) -> Shapes:
        found: Shapes = {f"{at}.weight": (size,)}
        if "Gated" in c["norm_type"]:
            found |= {f"{at}.gate_up_projection.weight": (RANK, size)}
            found |= {f"{at}.gate_down_projection.weight": (size, RANK)}
        return found

    return shapes


def _giga_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    norms, count = _giga_norms(c), c["num_hidden_layers"]
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("lm_head.weight", (VOCAB, SIZE)))
    yield from norms("model.norm", SIZE).items()
    for i, kind in enumerate(c["layer_types"]):
        own = _giga_layer(c, kind, i >= c["first_k_dense_replace"])
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in own.items())
    for k in range(c["num_nextn_predict_layers"]):
        head = _giga_layer(c, "attention", c["nextn_is_sparse"]) | {"eh_proj.weight": (SIZE, 2 * SIZE)}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            head |= norms(name, SIZE)
        yield from ((f"model.layers.{count + k}.{name}", shape) for name, shape in head.items())


def giga_norm(c: Config, w: Tensors, at: str, x: Tensor) -> Tensor:
    """x may have any number of dimensions. The gate reads what is normed."""
    h = rms(x, w[f"{at}.weight"] + float("ZeroCentered" in c["norm_type"]), EPS)
    if "Gated" not in c["norm_type"]:
        return h
    low = F.silu(h @ w[f"{at}.gate_up_projection.weight"].T)
    return c["layernorm_gating_weight"] * h * (low @ w[f"{at}.gate_down_projection.weight"].T).sigmoid()


def _giga_delta(c: Config, w: Tensors, x: Tensor) -> Tensor:
    dk, dv, each = c["linear_key_head_dim"], c["linear_value_head_dim"], VALUES // KEYS
    parts = (x @ w["in_proj_qkvz.weight"].T).view(len(x), KEYS, -1).split([dk, dk, each * dv, each * dv], -1)
    beta, a = (x @ w["in_proj_ba.weight"].T).view(len(x), KEYS, -1).chunk(2, -1)
    mixed = _convolve(torch.cat([p.flatten(1) for p in parts[:3]], -1), w["conv1d.weight"])
    q, k, v = mixed.split([KEYS * dk, KEYS * dk, VALUES * dv], -1)
    q, k = (heads_of(m, dk).repeat_interleave(each, 1) for m in (q, k))
    decay = -w["A_log"].exp() * F.softplus(a.flatten(1) + w["dt_bias"])
    out = _delta_rule(q, k, heads_of(v, dv), decay[..., None], beta.flatten(1).sigmoid())
    weight = w["norm.weight"] + float("zero_centered" in c["linear_gating_type"])
    gate = parts[3].reshape(out.shape)
    gate = gate.sigmoid() if c["output_gate_type"] == "sigmoid" else F.silu(gate)
    y = c["linear_sigmoid_gate_scale"] * rms(out, weight, EPS) * gate
    return y.flatten(1) @ w["out_proj.weight"].T


def _giga_latent(c: Config, w: Tensors, x: Tensor) -> Tensor:
    heads, nope, rank, kv = (
        c["num_attention_heads"],
        c["qk_nope_head_dim"],
        c["q_lora_rank"],
        c["kv_lora_rank"],
    )
    alpha = [(SIZE / r) ** 0.5 if c["use_mla_scaling_factor"] else 1.0 for r in (rank or SIZE, kv)]
    if rank:
        low = alpha[0] * giga_norm(c, w, "q_a_layernorm", x @ w["q_a_proj.weight"].T)
        q = heads_of(low @ w["q_b_proj.weight"].T, nope + c["qk_rope_head_dim"])
    else:
        q = heads_of(x @ w["q_proj.weight"].T, nope + c["qk_rope_head_dim"])
    both = x @ w["kv_a_proj_with_mqa.weight"].T
    latent = alpha[1] * giga_norm(c, w, "kv_a_layernorm", both[:, :kv])
    k, v = heads_of(latent @ w["kv_b_proj.weight"].T, nope + c["v_head_dim"]).split(
        [nope, c["v_head_dim"]], -1
    )
    near = c.get("rope_interleave", True)
    rotated = turned(both[:, None, kv:], c["rope_theta"], neighbours=near).expand(-1, heads, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], c["rope_theta"], neighbours=near)], -1)
    out = attend(q, torch.cat([k, rotated], -1), v, q.shape[-1] ** -0.5).flatten(1)
    out = out * (x @ w["gate_proj.weight"].T).sigmoid() if c["gated_attention"] else out
    return out @ w["o_proj.weight"].T


def giga_layer(c: Config, w: Tensors, x: Tensor, kind: str, sparse: bool) -> Tensor:
    """One layer, with norms where the config has them."""
    limit = c["swiglu_limit"] or torch.inf

    def mix(h: Tensor) -> Tensor:
        return (_giga_delta if kind == "linear_attention" else _giga_latent)(c, _below(w, "self_attn."), h)

    def feed(h: Tensor) -> Tensor:
        if not sparse:
            return _mlp(w, "mlp", h, limit)
        count = c["num_experts_per_tok"]
        routed = _route(w, h, count, lambda e, row: _mlp(w, f"mlp.experts.{e}", row, limit))
        return c["routed_scaling_factor"] * routed + _mlp(w, "mlp.shared_experts", h, limit)

    names = (("input", "post_self_attn", mix), ("post_attention", "post_feedforward", feed))
    for before, behind, run in names:
        h = giga_norm(c, w, f"{before}_layernorm", x) if c["layernorm_type"] != "post" else x
        y = run(h)
        x = x + (giga_norm(c, w, f"{behind}_layernorm", y) if c["layernorm_type"] != "pre" else y)
    return x


def giga_hidden(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    """[T] -> what the last norm gives, [T, hidden]."""
    x = t["model.embed_tokens.weight"][ids]
    for i, kind in enumerate(c["layer_types"]):
        x = giga_layer(c, _below(t, f"model.layers.{i}."), x, kind, i >= c["first_k_dense_replace"])
    return giga_norm(c, t, "model.norm", x)


def _giga_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    return giga_hidden(c, t, ids) @ t["lm_head.weight"].T


def giga_draft(c: Config, t: Tensors, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What the head makes of tokens and of the states before them, both [T, …].

    (what its last norm reads, from which the next token is drafted; logits).
    """
    w = _below(t, f"model.layers.{c['num_hidden_layers']}.")
    e = giga_norm(c, w, "enorm", t["model.embed_tokens.weight"][ids])
    x = torch.cat([e, giga_norm(c, w, "hnorm", hidden)], -1) @ w["eh_proj.weight"].T
    x = giga_layer(c, w, x, "attention", c["nextn_is_sparse"])
    return x, giga_norm(c, w, "shared_head.norm", x) @ t["lm_head.weight"].T


HYBRIDS: Mapping[str, OlderFamily] = {
    "alice_ai": Hybrid(ALICE, _alice_shapes, _alice_logits),
    "gigachat": Hybrid(GIGACHAT, _giga_shapes, _giga_logits),
}
