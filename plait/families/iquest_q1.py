"""IQuest Q1: experts behind a dense layer, windows, a learned key in each softmax, normed residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored, expert, expert_half, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    gqa,
    mlp,
    model,
    norm,
    require,
    require_silu,
    rope,
    softmax_moe,
)
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
FIRST, BLOCK, BLOCKS, LAST = (
    *("first_layers_types", "hybrid_layers_types_block", "num_hybrid_layers_block"),
    "last_layers_types",
)
DEFAULTS: Mapping[str, object] = {
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 128,
    "rotary_dim": 32,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "max_position_embeddings": 524_288,
    "dense_intermediate_size": 12_288,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [0],
    "use_hybrid_layers": True,
    FIRST: [FULL],
    BLOCK: [FULL, SLIDING, SLIDING, SLIDING],
    BLOCKS: 21,
    LAST: [FULL, FULL, FULL],
    "enable_sink_attention": True,
    "first_layer_attn_out_scale": 1.0,
    "first_layer_ffn_out_scale": 1.0,
    "attn_out_scale": 1.0,
    "ffn_out_scale": 0.53881590608,
    "logit_scale": 1.0,
}


@family(
    "IQuestQ1ForCausalLM",
    model_types=("iquest_q1",),
    defaults=DEFAULTS,
    honours=("sliding_window", "no_rope_layers", "logit_scale"),
)
def iquest_q1(c: Config) -> tuple[ModelSpec, NameMap]:
    """IQuest Q1: behind the first layer, attention is added to what it reads. Raises UnsupportedModel."""
    _fill_nulls(c)
    require_silu(c, "IQuest Q1")
    require(c, "IQuest Q1", moe_router_dtype=("fp32",), enable_lm_head_fp32=(True,))
    require(c, "IQuest Q1", use_over_encoding=(False,), attention_bias=(False,))
    layers = [_build_layer(c, i, kind) for i, kind in enumerate(_list_kinds(c))]
    spec = model(c, "iquest_q1", layers, logit_scale=float(c["logit_scale"]))
    unused = unused_patterns(c, r"^mtp_layers\.")  # they draft
    return spec, NameMap(_names(c["num_experts"]), transformer(), ignored=unused)


def _fill_nulls(c: Config) -> None:
    """A list that is null is the usual one."""
    if c["mlp_only_layers"] is None and "mlp_layer_words" not in c:
        c["mlp_layer_types"] = ["sparse" if i else "dense" for i in range(len(c["layer_types"]))]
    c |= {key: DEFAULTS[key] for key in (FIRST, BLOCK, LAST, "mlp_only_layers") if c[key] is None}


def _list_kinds(c: Config) -> list[str]:
    """What each layer attends to: some at both ends, and between them a block, repeated."""
    count, repeats = c["num_hidden_layers"], c[BLOCKS] if c["use_hybrid_layers"] else 0
    if not isinstance(repeats, int) or not 0 <= repeats <= count:
        raise UnsupportedModel(
            f"{BLOCKS} is {repeats!r:.40}; expected is a number of blocks in {count} layers"
        )
    kinds = [*c[FIRST], *c[BLOCK] * repeats, *c[LAST]] if c["use_hybrid_layers"] else [FULL] * count
    window, whole = c.get("sliding_window"), [FULL] * count
    listed = c.get("layer_words") or kinds
    agrees = listed == kinds or (window is None and listed == whole)
    if len(kinds) != count or not agrees or {*kinds} - {FULL, SLIDING}:
        raise UnsupportedModel(
            f"{FIRST}, {BLOCK} ({BLOCKS} times) and {LAST} are {kinds!r:.200}; expected are {FULL!r} and "
            f"{SLIDING!r} for {count} layers, as in layer_types where there are any"
        )
    if window is not None and int(window) < 1:
        raise UnsupportedModel(f"sliding_window is {window}; expected is a number of tokens, or null")
    return whole if window is None else kinds


def _build_layer(c: Config, i: int, kind: str) -> tuple[BranchSpec, BranchSpec]:
    each, is_first = norm(c), i == 0
    scales = [float(c[f"{'first_layer_' * is_first}{x}_out_scale"]) for x in ("attn", "ffn")]
    mixer = gqa(c, kind, qk_norm=each, sink_keys=bool(c["enable_sink_attention"]))
    turns = replace(rope(c, c["head_dim"]), theta=rope(c, c["head_dim"], kind).theta)  # scaled alike
    mixer = replace(mixer, rope=None if i in (c.get("no_rope_layers") or ()) else turns)
    if (scale := c.get("softmax_scale")) is not None:
        mixer = replace(mixer, scale=float(scale))
    is_sparse = c["mlp_layer_types"][i] == "sparse"
    feed = softmax_moe(c) if is_sparse else mlp(c, c["dense_intermediate_size"])
    return (
        BranchSpec("attn", mixer, each, each, scale=scales[0], keep=None if is_first else 1.0),
        BranchSpec("ffn", feed, each, each if is_first else None, scale=scales[1]),
    )


def _names(count: int) -> Rules:
    stacked = f"{L}.mlp.experts.fc"
    return {
        f"{ATTN}.norm": f"{L}.attention_norm",
        f"{ATTN}.post_norm": f"{L}.attn_out_norm",
        f"{ATTN}.sink_keys": Derived(_drop_first, (f"{L}.self_attn.sink_k",)),
        f"{FFN}.norm": f"{L}.feed_forward_norm",
        f"{FFN}.post_norm": f"{L}.ffn_out_norm",
        f"{FFN}.router": (f"{L}.mlp.router", f"{L}.mlp.gate"),
        f"{FFN}.experts.{{e}}.gate.weight": expert_half(0, count, stacked),
        f"{FFN}.experts.{{e}}.up.weight": expert_half(1, count, stacked),
        f"{FFN}.experts.{{e}}.down.weight": expert(count, f"{L}.mlp.experts.proj"),
    }


def _drop_first(keys: Stored, **_: str) -> Stored:
    """A dimension of one more is before heads in some files."""
    return as_tensor(keys).flatten(0, -2)
