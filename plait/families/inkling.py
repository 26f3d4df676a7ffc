"""Inkling (text): attention with a bias for each token and distance, short convolutions, shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hyper import move_inside
from plait.families.common.recipes import (
    Stored,
    either,
    expert,
    expert_rows,
    expert_tensors,
    turn,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require
from plait.families.config.normalize import Config
from plait.quant.weight import Scalable, as_tensor, pick_rows
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, RouterSpec
from plait.spec.positions import TemperatureSpec

ATTN, FFN, INSIDE, NEAR = "layers.{i}.attn", "layers.{i}.ffn", "inner", "hybrid_sliding"
CONVS = ((ATTN, "attn"), (FFN, "mlp"))
MOST_SHARED = 64  # experts: each has names of its own
NEVER = -1e30  # the logit of what is no token
ALWAYS = 1e6  # what the choice of a shared expert is moved by: no score is as large
SENSES = r"(^|\.)(audio|visual|audio_tower|vision_tower|multi_modal_projector)\."
PREFIXES = ("model.", "model.language_model.", "language_model.model.")


@family(
    *("InklingForCausalLM", "InklingForConditionalGeneration"),
    model_types=("inkling_text", "inkling_mm_model"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "conv_kernel_size": 4,
        "d_rel": 16,
        "rel_extent": 1024,
        "log_scaling_n_floor": None,
        "log_scaling_alpha": 0.1,
        "routed_scaling_factor": 8.0,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "logits_mup_width_multiplier": 24.0,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        "sliding_window_size": 512,
        "unpadded_vocab_size": None,
    },
    honours=("sliding_window",),
    detection=Detection(
        markers=(
            Marker(("self_attn.rel_logits_proj.proj",), order=207),
            Marker(("attn.rel_logits_proj.proj",), order=208),
        )
    ),
)
def build_inkling(c: Config) -> tuple[ModelSpec, NameMap]:
    """Inkling, as published and as transformers writes it. It has no positions but the bias."""
    require(c, "Inkling", shared_expert_sink=(True,), hidden_act=("silu",))
    if c.get("dense_intermediate_size") is not None:
        c["moe_intermediate_size"] = c["intermediate_size"]
        c["intermediate_size"] = c["dense_intermediate_size"]
    each, taps = norm(c), c.get("sconv_kernel_size") or c["conv_kernel_size"]
    near, sorts = find_near(c), _find_sorts(c)
    ffn = {"dense": mlp(c), "sparse": _experts(c)}
    layers = [
        (
            BranchSpec("attn", ConvolvedSpec({INSIDE: _attention(c, is_near, taps)}, taps=taps), each),
            BranchSpec("ffn", ConvolvedSpec({INSIDE: ffn[sort]}, taps=taps), each),
        )
        for is_near, sort in zip(near, sorts, strict=True)
    ]
    scale = 1.0 / c["logits_mup_width_multiplier"]
    spec = model(c, "inkling_text", layers, embed_norm=each, logit_scale=scale, tied=False)
    names = {**either(*(_names(c, prefix) for prefix in PREFIXES), _first_names(c)), **_head(c)}
    return spec, NameMap(names, ignored=unused_patterns(c, SENSES, r"^model\.mtp\."))


def find_near(c: Config) -> list[bool]:
    """Whether each layer has a window: all but every sixth, if the config does not say."""
    if words := c.get("layer_words"):
        return [word == NEAR for word in words]
    count, own = c["num_hidden_layers"], c.get("local_layer_ids")
    return [(i + 1) % 6 != 0 if own is None else i in own for i in range(count)]


def _find_sorts(c: Config) -> list[str]:
    """dense or sparse for each layer."""
    count, given = len(c["layer_types"]), c.get("mlp_layer_types")
    dense = c.get("dense_mlp_idx") or 0
    return ["dense" if i < dense else "sparse" for i in range(count)] if dense or not given else list(given)


def _attention(c: Config, is_near: bool, taps: int) -> RelativeSpec:
    own = "swa_" if is_near else ""
    heads, kv = (c[f"{own}num_{x}_heads"] for x in ("attention", "key_value"))
    dim, window = c[f"{own}head_dim"], c["sliding_window_size"] if is_near else None
    floor, grown = None if is_near else c["log_scaling_n_floor"], None
    if floor:
        grown = TemperatureSpec(float(c["log_scaling_alpha"]), float(floor), 1.0, late=True)
    if heads % kv or min(c["d_rel"], c["rel_extent"], c["sliding_window_size"]) < 1:
        raise UnsupportedModel(
            f"{heads} heads over {kv} key-value heads, {c['d_rel']} profiles of {c['rel_extent']} distances, "
            f"and a window of {c['sliding_window_size']}: heads share evenly, of others there is one or more"
        )
    return RelativeSpec(
        *(heads, kv, dim, 1.0 / dim),
        window=window,
        qk_norm=norm(c),
        temperature=grown,
        rank=c["d_rel"],
        extent=window or c["rel_extent"],
        taps=taps,
    )


def _experts(c: Config) -> MoeSpec:
    """The shared experts are among the others, and always chosen: weights of all that are chosen sum to 1."""
    shared = c["num_shared_experts"]
    if not 0 < shared <= MOST_SHARED:
        raise UnsupportedModel(f"{shared} shared experts are not implemented; known: 1 to {MOST_SHARED}")
    router = RouterSpec("sigmoid", scale=float(c["routed_scaling_factor"]))
    expert = mlp(c, c["moe_intermediate_size"])
    return MoeSpec(
        *(c["num_experts"] + shared, c["num_experts_per_tok"] + shared, expert, router), expert_scale=True
    )


def _names(c: Config, prefix: str) -> Rules:
    """As transformers writes it."""
    layer, count, shared = f"{prefix}layers.{{i}}", c["num_experts"], c["num_shared_experts"]
    attn, ffn = f"{layer}.self_attn", f"{layer}.mlp"
    always = {
        f"{FFN}.experts.{count + k}.{x}.weight": _member(k, shared, f"{ffn}.shared_experts.{x}_proj")
        for k in range(shared)
        for x in ("gate", "up", "down")
    }
    inside: Rules = {
        f"{ATTN}.conv.weight": join_taps(f"{attn}.k_sconv.conv1d.weight", f"{attn}.v_sconv.conv1d.weight"),
        f"{ATTN}.profiles": turn(f"{attn}.rel_logits_proj.proj"),
        f"{ATTN}.{{x}}_norm": f"{attn}.{{x}}_norm",
        f"{ATTN}.mix": f"{attn}.r_proj",
        **{f"{ATTN}.{x}": f"{attn}.{x}_proj" for x in "qkvo"},
        **_router(c, ffn, "e_score_correction_bias"),
        **always,
        **expert_tensors(FFN, ffn, count),
        f"{FFN}.down.weight": _times(f"{ffn}.down_proj.weight", f"{ffn}.global_scale"),
        **{f"{FFN}.{x}.weight": f"{ffn}.{x}_proj.weight" for x in ("gate", "up")},
    }
    outside: Rules = {
        "embed.norm": f"{prefix}embed_tokens.embed_norm",
        "embed": f"{prefix}embed_tokens",
        "norm": f"{prefix}norm",
        f"{ATTN}.norm": f"{layer}.input_layernorm",
        f"{FFN}.norm": f"{layer}.post_attention_layernorm",
        **{f"{ours}.conv.weight": join_taps(f"{layer}.{x}_sconv.conv1d.weight") for ours, x in CONVS},
    }
    return {**outside, **move_inside(inside, ("attn", "ffn"))}


def _first_names(c: Config) -> Rules:
    """As published: rows of gate and up take turns."""
    layer, count, shared = "model.llm.layers.{i}", c["num_experts"], c["num_shared_experts"]
    attn, ffn = f"{layer}.attn", f"{layer}.mlp"
    w13, w2 = (f"{ffn}.shared_experts.shared_{x}_weight" for x in ("w13", "w2"))
    always: dict[str, Source] = {}
    for k in range(shared):
        ours = f"{FFN}.experts.{count + k}"
        always |= {f"{ours}.{x}.weight": pick_turns(n, w13, k, shared) for n, x in enumerate(("gate", "up"))}
        always[f"{ours}.down.weight"] = _member(k, shared, w2)
    inside: Rules = {
        f"{ATTN}.conv.weight": join_taps(f"{attn}.k_sconv.weight", f"{attn}.v_sconv.weight"),
        f"{ATTN}.profiles": turn(f"{attn}.rel_logits_proj.proj"),
        f"{ATTN}.{{x}}_norm": f"{attn}.{{x}}_norm",
        **{f"{ATTN}.{x}": f"{attn}.w{x}_d{end}" for x, end in (("q", "u"), ("k", "v"), ("v", "v"))},
        f"{ATTN}.mix": f"{attn}.wr_du",
        f"{ATTN}.o": f"{attn}.wo_ud",
        **_router(c, ffn, "bias"),
        **always,
        **{
            f"{FFN}.experts.{{e}}.{x}.weight": pick_turns(n, f"{ffn}.experts.w13_weight", None, count)
            for n, x in enumerate(("gate", "up"))
        },
        f"{FFN}.experts.{{e}}.down.weight": expert(count, f"{ffn}.experts.w2_weight"),
        f"{FFN}.down.weight": _times(f"{ffn}.w2_md.weight", f"{ffn}.global_scale"),
        f"{FFN}.gate.weight": pick_turns(0, f"{ffn}.w13_dn.weight", 0, 1),
        f"{FFN}.up.weight": pick_turns(1, f"{ffn}.w13_dn.weight", 0, 1),
    }
    outside: Rules = {
        "embed.norm": "model.llm.embed_norm",
        "embed": "model.llm.embed",
        "norm": "model.llm.norm",
        f"{ATTN}.norm": f"{layer}.attn_norm",
        f"{FFN}.norm": f"{layer}.mlp_norm",
        **{f"{ours}.conv.weight": join_taps(f"{layer}.{x}_sconv.weight") for ours, x in CONVS},
    }
    return {**outside, **move_inside(inside, ("attn", "ffn"))}


def _router(c: Config, theirs: str, bias: str) -> dict[str, Source]:
    count, shared = c["num_experts"], c["num_shared_experts"]

    def always(w: Stored, **_: str) -> Tensor:
        given = as_tensor(w).float()
        return torch.cat([given, given.new_full((shared,), ALWAYS)])

    def each(w: Stored, **_: str) -> Tensor:
        return as_tensor(w).float().expand(count + shared)

    return {
        f"{FFN}.router_bias": Derived(always, (f"{theirs}.gate.{bias}",), (Back(lambda w: w[:count]),)),
        f"{FFN}.expert_scale": Derived(each, (f"{theirs}.gate.global_scale",), (Back(lambda w: w[:1]),)),
        f"{FFN}.router.weight": f"{theirs}.gate.weight",
    }


def _member(k: int, count: int, source: str) -> Derived:
    """Matrix k of a stack."""
    return Derived(lambda w, **_: expert_rows(w, k, count), (source,), (Back(at=k, of=count),))


def pick_turns(index: int, source: str, k: int | None, count: int) -> Derived:
    """Every second row, from row `index` on, of matrix k of a stack; None: of that of the expert."""

    def pick(w: Stored, e: str = "0", **_: str) -> Stored:
        one = expert_rows(w, int(e) if k is None else k, count)
        return pick_rows(one, torch.arange(index, one.shape[0], 2))

    def in_turns(*parts: Tensor) -> Tensor:
        return torch.stack(parts, 1).flatten(0, 1)

    back = Back(at=index, of=2, stack=count, join=in_turns)
    return Derived(pick, (source,), (back,) if k is None else ())


def _times(matrix: str, factor: str) -> Derived:
    """A weight matrix times a stored number."""

    def product(w: Stored, by: Stored, **_: str) -> Stored:
        one = as_tensor(by).float().flatten()
        if isinstance(w, Scalable):
            return w.times(one[0])
        return (as_tensor(w).float() * one).to(as_tensor(w).dtype)

    return Derived(product, (matrix, factor), (Back(), Back(lambda w: torch.ones(1))))


def join_taps(*sources: str, scale: float = 1.0) -> Derived:
    """Depthwise kernels [C, 1, K], one behind the other, of which the newest tap adds the input, too.

    scale: of what they make.
    """

    def joined(*kernels: Stored, **_: str) -> Tensor:
        taps = torch.cat([as_tensor(kernel).flatten(1).float() for kernel in kernels])
        taps[:, -1] += 1.0
        return taps * scale

    def back(n: int) -> Callable[[Tensor], Tensor]:
        def apart(w: Tensor) -> Tensor:
            own = w.chunk(len(sources))[n] / scale
            own[:, -1] -= 1.0
            return own[:, None]

        return apart

    return Derived(joined, sources, tuple(Back(back(n)) for n in range(len(sources))))


def _head(c: Config) -> Rules:
    """The table of logits. Tokens that only pad the vocabulary have none."""
    sources = ("lm_head.weight", "model.llm.unembed.weight")
    size, own = c["vocab_size"], c["unpadded_vocab_size"]
    if own is None or own >= size:
        return {"head.weight": (*sources, "language_model.lm_head.weight")}

    def padded(w: Stored, **_: str) -> Tensor:
        rows = as_tensor(w)
        return torch.cat([rows[:own], rows.new_zeros(size - own, rows.shape[1])])

    def silent(w: Stored, **_: str) -> Tensor:
        return torch.cat([torch.zeros(own), torch.full((size - own,), NEVER)])

    return {
        "head.weight": tuple(Derived(padded, (x,), (Back(),)) for x in sources),
        "head.bias": tuple(Derived(silent, (x,)) for x in sources),
    }
