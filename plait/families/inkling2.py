"""Inkling 2 (text): sinks and taps of each token, limited lengths, attention residuals of normed sources."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.depth import LAST, over_depth
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import Stored, expert, join_vectors, reorder_rows, turn, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import model, norm, require, sigmoid_router
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.families.inkling import NEAR, SENSES, find_near, join_taps, pick_turns
from plait.quant.weight import as_tensor, take_rows
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from plait.spec.positions import TemperatureSpec

TOP, BLOCK = "model.llm", "n_layers_per_attn_res_block"
ATTN, FFN, INSIDE = "layers.{i}.attn", "layers.{i}.ffn", "inner"
SOURCE_EPS = 1e-6  # of the norm of sources, which no config has
CAPS = {"mlp_gate_softcap": (4.0,), "mlp_up_softcap": (25.0,)}  # those of `situ`
DEFAULTS: Mapping[str, object] = {
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "conv_kernel_size": 4,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128_000,
    "log_scaling_alpha": 0.1,
    "routed_scaling_factor": 8.0,
    "num_experts_per_tok": 8,
    "num_experts": 384,
    "moe_intermediate_size": 2304,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "swa_num_attention_heads": 48,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 128,
    "sliding_window_size": 1024,
    "unpadded_vocab_size": 200_058,
    "final_logit_softcapping": 30.0,
    "qk_l2_clip_threshold": 22.627416997969522,
    "rel_l2_clip_threshold": 8.0,
    BLOCK: 6,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
    "scoring_func": "sigmoid",
}


def infer_sizes(t: Tensors) -> None:
    """Of both kinds of layers: heads and their widths are in what queries are multiplied by."""
    far = "attn.k_sconv.static_w"
    t.put("layer_types", t.words({far: "hybrid"}, NEAR), "the tensors of each layer")
    for own, beside in (("", far), ("swa_", "attn.k_sconv.weight")):
        if (scale := t.first("attn.q_l2_clip.scale", beside=beside)) is None:
            continue
        keys = t.need("attn.wk_dv.weight", beside=beside)
        t.size(f"{own}num_attention_heads", scale[1][0], scale)
        t.size(f"{own}head_dim", scale[1][1], scale)
        t.size(f"{own}num_key_value_heads", keys[1][0] // max(1, scale[1][1]), keys)
        profiles = t.need("attn.rel_logits_proj.proj", beside=beside)
        t.size("d_rel", profiles[1][0], profiles)
        t.size("sliding_window_size" if own else "rel_extent", profiles[1][1], profiles)
    taps, down = t.need("mlp_sconv.weight"), t.need("mlp.experts.w2_weight")
    t.size("conv_kernel_size", taps[1][-1], taps)
    t.size("num_experts", down[1][0], down)
    t.size("moe_intermediate_size", down[1][-1], down)
    if table := t.ends.get(f"{TOP}.embed.weight"):
        t.size("vocab_size", table[0], (f"{TOP}.embed.weight", table))
        t.size("hidden_size", table[1], (f"{TOP}.embed.weight", table))
    t.default(BLOCK, 6, f"the tensors do not tell; six layers are usual, --set {BLOCK}=…")
    t.default("num_experts_per_tok", 8)


@family(
    *("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"),
    model_types=("inkling2_text", "inkling2"),
    defaults=DEFAULTS,
    honours=("sliding_window", "final_logit_softcapping"),
    detection=Detection(
        markers=(Marker(("attn.attn_sink_proj.weight",), order=206),),
        sizes=infer_sizes,
        usual={"max_position_embeddings": 1_048_576},
    ),
)
def build_inkling2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Inkling 2. It has no positions but the bias. Raises UnsupportedModel."""
    spec, names = build_text(c, "inkling2_text")
    return spec, NameMap(names, ignored=unused_patterns(c, SENSES))


def build_text(c: Config, family: str, split: Container[int] = ()) -> tuple[ModelSpec, Rules]:
    """(the model, its tensors' names). split: layers of which queries, keys and values may read apart."""
    require(c, "Inkling 2", hidden_act=("silu",), scoring_func=("sigmoid",), **CAPS)
    rows, each, taps = c["vocab_size"], norm(c), c.get("sconv_kernel_size") or c["conv_kernel_size"]
    c["vocab_size"] = min(rows, c["unpadded_vocab_size"] or rows)  # what is behind is no token
    near = find_near(c)
    layers = [
        (
            BranchSpec(
                "attn", ConvolvedSpec({INSIDE: _attention(c, is_near, taps, i in split)}, taps=taps), each
            ),
            BranchSpec("ffn", ConvolvedSpec({INSIDE: _experts(c)}, taps=taps), each),
        )
        for i, is_near in enumerate(near)
    ]
    cap = float(c["final_logit_softcapping"])
    spec = model(c, family, layers, embed_norm=each, tied=False, logit_softcap=cap or None)
    reads = [1 if is_near else 3 for is_near in near]
    spec = over_depth(spec, c[BLOCK], SOURCE_EPS, of_normed=True, reads=reads)
    return spec, {**_names(c, taps), **_depth_names(c), **_tables(rows, c["vocab_size"])}


def _attention(c: Config, is_near: bool, taps: int, is_split: bool) -> RelativeSpec:
    own = "swa_" if is_near else ""
    heads, kv = (c[f"{own}num_{x}_heads"] for x in ("attention", "key_value"))
    dim, window = c[f"{own}head_dim"], c["sliding_window_size"] if is_near else None
    limits = float(c["qk_l2_clip_threshold"]), float(c["rel_l2_clip_threshold"])
    floor = float(c["log_scaling_n_floor"])
    if heads % kv or min(c["d_rel"], c["rel_extent"], c["sliding_window_size"], floor, *limits) <= 0:
        raise UnsupportedModel(
            f"{heads} heads over {kv} key-value heads, {c['d_rel']} profiles of {c['rel_extent']} distances, "
            f"a window of {c['sliding_window_size']}, log_scaling_n_floor {floor:g}, and lengths up to "
            f"{limits}: heads share evenly, and all else is above 0"
        )
    return RelativeSpec(
        *(heads, kv, dim, dim**-0.5),
        window=window,
        gate=True,
        v_norm=NormSpec(c["norm_eps"], weight=False),
        temperature=None
        if is_near
        else TemperatureSpec(float(c["log_scaling_alpha"]), floor, 1.0, late=True),
        rank=c["d_rel"],
        extent=window or c["rel_extent"],
        taps=taps,
        lengths=limits,
        token_sinks=True,
        apart=not is_near,
        split=is_near and is_split,
    )


def _experts(c: Config) -> MoeSpec:
    expert = MlpSpec(c["moe_intermediate_size"], "situ")
    return MoeSpec(c["num_experts"], c["num_experts_per_tok"], expert, sigmoid_router(c))


def _names(c: Config, taps: int) -> Rules:
    """As published, which is what transformers writes."""
    layer, count = f"{TOP}.layers.{{i}}", c["num_experts"]
    attn, ffn, a, f = f"{layer}.attn", f"{layer}.mlp", f"{ATTN}.{INSIDE}", f"{FFN}.{INSIDE}"
    scale = (taps + 1) ** -0.5
    inputs = tuple(f"{layer}.{x}_input_norm.weight" for x in "qkv")
    latest_last = torch.arange(c["num_key_value_heads"] * taps).view(-1, taps).flip(1).flatten()
    own_taps: Rules = {
        rule: source
        for x in "kv"
        for rule, source in (
            (f"{a}.{INSIDE}.{x}_taps.weight", reorder_rows(latest_last, f"{attn}.{x}_sconv.weight_proj")),
            (f"{a}.{INSIDE}.{x}_fixed", _fixed_taps(f"{attn}.{x}_sconv.static_w")),
        )
    }
    return {
        "embed.norm": f"{TOP}.embed_norm",
        "norm": f"{TOP}.norm",
        f"{ATTN}.norm.weight": (f"{layer}.attn_norm.weight", join_vectors(*inputs)),
        f"{FFN}.norm": f"{layer}.mlp_norm",
        f"{a}.conv.weight": join_taps(f"{layer}.attn_sconv.weight", scale=scale),
        f"{f}.conv.weight": join_taps(f"{layer}.mlp_sconv.weight", scale=scale),
        f"{a}.{INSIDE}.conv.weight": join_taps(*(f"{attn}.{x}_sconv.weight" for x in "kv"), scale=scale),
        **own_taps,
        f"{a}.{INSIDE}.q_scale": f"{attn}.q_l2_clip.scale",
        f"{a}.{INSIDE}.mix_scale": f"{attn}.rel_l2_clip.scale",
        f"{a}.{INSIDE}.profiles": turn(f"{attn}.rel_logits_proj.proj"),
        **{f"{a}.{INSIDE}.{x}": f"{attn}.w{x}_d{end}" for x, end in (("q", "u"), ("k", "v"), ("v", "v"))},
        f"{a}.{INSIDE}.mix": f"{attn}.wr_du",
        f"{a}.{INSIDE}.gate": f"{attn}.gate_attn",
        f"{a}.{INSIDE}.sink": f"{attn}.attn_sink_proj",
        f"{a}.{INSIDE}.o": f"{attn}.wo_ud",
        f"{f}.{INSIDE}.router_bias": f"{ffn}.gate.bias",
        f"{f}.{INSIDE}.router.weight": f"{ffn}.gate.weight",
        **{
            f"{f}.{INSIDE}.experts.{{e}}.{x}.weight": pick_turns(n, f"{ffn}.experts.w13_weight", None, count)
            for n, x in enumerate(("gate", "up"))
        },
        f"{f}.{INSIDE}.experts.{{e}}.down.weight": expert(count, f"{ffn}.experts.w2_weight"),
    }


def _depth_names(c: Config) -> Rules:
    """Queries of the sources, which are scored by products over √hidden; the first layer has none."""
    scale, top = c["hidden_size"] ** -0.5, f"{TOP}.attn_res"
    return {
        **{
            f"layers.{i}.attn.source": _times(scale, f"{top}.attn_queries.{i - 1}")
            for i in range(1, c["num_hidden_layers"])
        },
        f"{FFN}.source": _times(scale, f"{top}.mlp_queries.{{i}}"),
        f"layers.{{i}}.{LAST}.source": _times(scale, f"{top}.output_query"),
    }


def _tables(rows: int, tokens: int) -> Rules:
    """The embedding and the table of logits, of which the last rows only pad the vocabulary."""

    def padded(w: Tensor) -> Tensor:
        return torch.cat([w, w.new_zeros(rows - tokens, w.shape[1])])

    def table(source: str) -> Derived:
        return Derived(lambda w, **_: take_rows(w, 0, tokens), (source,), (Back(padded),))

    names = {"embed.weight": f"{TOP}.embed.weight", "head.weight": f"{TOP}.unembed.weight"}
    return names if tokens == rows else {ours: table(theirs) for ours, theirs in names.items()}


def _times(factor: float, source: str) -> Derived:
    """A tensor times a number, in float32."""
    return Derived(lambda w, **_: as_tensor(w).float() * factor, (source,), (Back(lambda w: w / factor),))


def _fixed_taps(source: str) -> Derived:
    """Taps [K, C] of distances 0, 1, … as [C, K], the oldest first; with the input, and scaled."""

    def made(w: Stored, **_: str) -> Tensor:
        taps = as_tensor(w).float().flip(0).T.clone()
        taps[:, -1] += 1.0
        return taps / math.sqrt(2 * taps.shape[1] + 1)

    def back(w: Tensor) -> Tensor:
        taps = w * math.sqrt(2 * w.shape[1] + 1)
        taps[:, -1] -= 1.0
        return taps.T.flip(0)

    return Derived(made, (source,), (Back(back),))
