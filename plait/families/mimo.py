"""MiMo 7B: Qwen2 with a head that drafts. MiMo-V2: windows with sinks and twice the heads of keys and values,
which are narrower than keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import HfConfig
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import (
    VISION,
    Stored,
    expert_tensors,
    part,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, sizes_by_kind
from plait.families.llama import QWEN, dense
from plait.quant.weight import as_tensor, pick_rows, take_rows
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, MtpSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"
LISTED = "hybrid_layer_pattern"  # 1 for layers with windows
BESIDE = (*VISION, r"^(audio_encoder|speech_embeddings)\.")
HONOURS = ("sliding_window", "attention_chunk_size")  # the latter is published, and no code reads it
WINDOW = HfConfig(instead={"sliding_window": "sliding_window_size"})
DRAFTS = "model.mtp_layers.0"
DRAFT_PARTS = {
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "fc": "input_proj",
    "norm": "final_layernorm",
}


@family("MiMoForCausalLM", model_types=("mimo",), defaults=QWEN, honours=("sliding_window",))
def mimo(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiMo 7B: the projection of its head for drafts reads the hidden state first, then the embedding."""
    spec, _ = dense(c, "mimo")
    parts: dict[str, Source] = {ours: f"{DRAFTS}.{theirs}" for ours, theirs in DRAFT_PARTS.items()}
    head = mtp_names(parts, transformer("model.mtp_"))
    names = NameMap(transformer(), head, ignored=unused_patterns(c, r"^model\.mtp_layers\."))
    return replace(spec, mtp=MtpSpec(spec.layers[:1], spec.norm, hidden_first=True)), names


@family(
    "MiMoV2FlashForCausalLM",
    model_types=("mimo_v2_flash",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
        "layer_cycle": [*[SLIDING] * 5, FULL],
        "first_layers": [FULL],
        "rope_theta": 5e6,
        "rope_local_base_freq": 1e4,
        "partial_rotary_factor": 0.334,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "sliding_window_size": None,
    },
    honours=HONOURS,
    hf=WINDOW,
)
def mimo_v2_flash(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiMo-V2-Flash. Its windows have twice the heads of keys and values where the config does not say."""
    if c.get("swa_num_key_value_heads") is None:
        c["swa_num_key_value_heads"] = 2 * c["num_key_value_heads"]
    return _build(c, "mimo_v2_flash")


@family(
    "MiMoV2ForCausalLM",
    model_types=("mimo_v2",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "attention_value_scale": None,
        "attention_projection_layout": "split",
        "add_swa_attention_sink_bias": False,
        "sliding_window_size": None,
    },
    honours=HONOURS,
    hf=WINDOW,
)
def mimo_v2(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiMo-V2.5, V2.5-Pro and V2.6 (text): the same layers, of which a config says all."""
    require(c, "MiMo-V2.5", attention_projection_layout=("split", "fused_qkv"))
    c.setdefault("v_head_dim", c["head_dim"])
    c.setdefault("swa_num_key_value_heads", c["num_key_value_heads"])
    if not c.get("layer_words") and not c.get(LISTED):
        period, layers = c.get("hybrid_block_size"), range(c["num_hidden_layers"])
        c[LISTED] = [int((i + 1) % period > 0) if period else 0 for i in layers]
    if c.get("moe_layer_freq") is None and not c.get("mlp_layer_words"):
        c["mlp_layer_types"] = ["dense"] * c["num_hidden_layers"]
    return _build(c, "mimo_v2")


def _build(c: Config, name: str) -> tuple[ModelSpec, NameMap]:
    """Values are padded to the width of keys, and scaled, while they load."""
    _read_layers(c)
    each, size = norm(c), c["moe_intermediate_size"]
    c.setdefault("routed_scaling_factor", 1.0)
    sinks = {
        kind: bool(c.get(f"add_{x}_attention_sink_bias")) for kind, x in ((FULL, "full"), (SLIDING, "swa"))
    }
    near = gqa(c, SLIDING, num_kv_heads=c["swa_num_key_value_heads"], sinks=sinks[SLIDING])
    attns = {FULL: gqa(c, FULL, sinks=sinks[FULL]), SLIDING: near}
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], mlp(c, size), sigmoid_router(c))
    ffns = {"sparse": BranchSpec("ffn", moe, each), "dense": BranchSpec("ffn", mlp(c), each)}
    kinds = zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    layers = [(BranchSpec("attn", attns[kind], each), ffns[feed]) for kind, feed in kinds]
    # Three heads of windowed, dense layers; the first one drafts, the others are ignored.
    mtp = MtpSpec(((BranchSpec("attn", attns[SLIDING], each), ffns["dense"]),), each)
    head = mtp_names(
        deepseek_parts("model.mtp.layers.0", "final_layernorm"),
        {f"{FFN}.norm": "model.mtp.layers.{i}.pre_mlp_layernorm"},
        *(_names(c, "model.mtp."), transformer("model.mtp.")),
    )
    names, unused = _names(c, "model."), unused_patterns(c, r"^model\.mtp\.")
    spec = model(c, name, layers, mtp=mtp)
    return spec, NameMap(names, transformer(), head, ignored=unused, beside=BESIDE)


def _read_layers(c: Config) -> None:
    """Which layers have windows, and how wide they are, in published words. Raises UnsupportedModel."""
    heads, dim, value = c["num_attention_heads"], c["head_dim"], c["v_head_dim"]
    require(c, "MiMo-V2", swa_num_attention_heads=(heads,), swa_head_dim=(dim,), swa_v_head_dim=(value,))
    require(c, "MiMo-V2", scoring_func=("sigmoid",), topk_method=("noaux_tc",), n_shared_experts=(0,))
    if value > dim:
        raise UnsupportedModel(
            f"v_head_dim = {value} is wider than head_dim = {dim}, which is not "
            "implemented for MiMo-V2; correct one with --set v_head_dim=VALUE"
        )
    if (size := c.get("sliding_window_size")) is not None:  # a query sees so many tokens before itself
        c["sliding_window"] = size + 1
    if (listed := c.get(LISTED)) and not c.get("layer_words"):
        if len(listed) != len(c["layer_types"]) or any(near not in (0, 1) for near in listed):
            raise UnsupportedModel(
                f"{LISTED} is {listed!r:.80}; expected is 0 or 1 for each of {len(c['layer_types'])} layers"
            )
        c["layer_types"] = [SLIDING if near else FULL for near in listed]


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    attn, mlp_at = f"{layer}.self_attn", f"{layer}.mlp"
    scale, widths = c["attention_value_scale"] or 1.0, (c["v_head_dim"], c["head_dim"])
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ATTN}.o.weight": _widen_columns(*widths, f"{attn}.o_proj.weight"),
        f"{ATTN}.sinks": (f"{attn}.attention_sink_bias", f"{attn}.sinks"),
        f"{FFN}.router": f"{mlp_at}.gate",
        f"{FFN}.router_bias": f"{mlp_at}.gate.e_score_correction_bias",
        **expert_tensors(FFN, mlp_at, c["num_experts"]),
    }
    for x in ("weight", "bias"):
        joined = f"{attn}.qkv_proj.{x}"
        names[f"{ATTN}.q.{x}"] = (f"{attn}.q_proj.{x}", _pick_shards(c, "q", joined))
        names[f"{ATTN}.k.{x}"] = (f"{attn}.k_proj.{x}", _pick_shards(c, "k", joined))
        apart, value = _widen_rows(scale, *widths, f"{attn}.v_proj.{x}"), _pick_shards(c, "v", joined)
        names[f"{ATTN}.v.{x}"] = (apart, _widen_rows_of(value, apart))
    return names


def _pick_shards(c: Config, which: str, source: str) -> Derived:
    """Queries, keys or values of one tensor: of each shard its queries, its keys, its values.

    There are as many shards as heads of keys in layers without windows; those with windows may have more
    heads in each. The published files are so, whatever the order of rows in the published code.
    """
    shards, dim, value = c["num_key_value_heads"], c["head_dim"], c["v_head_dim"]
    queries = c["num_attention_heads"] // shards * dim

    def pick(w: Stored, **_: str) -> Stored:
        each = w.shape[0] // shards
        kv = (each - queries) // (dim + value)
        sizes = (queries, kv * dim, kv * value)
        if kv < 1 or shards * sum(sizes) != w.shape[0]:
            raise ValueError(f"{w.shape[0]} rows are no {shards} shards of queries, keys and values")
        rows = torch.arange(w.shape[0]).view(shards, each).split(sizes, 1)
        return pick_rows(w, rows["qkv".index(which)].flatten())

    return Derived(pick, (source,))


def _widen_rows_of(found: Derived, widen: Derived) -> Derived:
    """The same of rows that another recipe finds."""
    return Derived(lambda w, **own: widen.fn(found.fn(w, **own)), found.sources)


def _widen_rows(scale: float, narrow: int, wide: int, source: str) -> Derived:
    """Zeros behind the rows of each head, and every row scaled."""

    def widen(w: Stored, **_: str) -> Tensor:
        heads = as_tensor(w).unflatten(0, (-1, narrow)) * scale
        return pad(heads, (*(0,) * (2 * heads.dim() - 4), 0, wide - narrow)).flatten(0, 1)

    return Derived(
        widen, (source,), (Back(lambda w: w.unflatten(0, (-1, wide))[:, :narrow].flatten(0, 1) / scale),)
    )


def _widen_columns(narrow: int, wide: int, source: str) -> Derived:
    """Zeros behind the columns of each head."""

    def widen(w: Stored, **_: str) -> Tensor:
        return pad(as_tensor(w).unflatten(1, (-1, narrow)), (0, wide - narrow)).flatten(1)

    return Derived(widen, (source,), (Back(lambda w: w.unflatten(1, (-1, wide))[..., :narrow].flatten(1)),))


def _gguf_names(c: Config) -> Rules:
    b, scale, widths = "blk.{i}", c["attention_value_scale"] or 1.0, (c["v_head_dim"], c["head_dim"])
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ATTN}.v.bias": _widen_rows(scale, *widths, f"{b}.attn_v.bias"),
        f"{ATTN}.o.weight": _widen_columns(*widths, f"{b}.attn_output.weight"),
        f"{ATTN}.sinks": f"{b}.attn_sinks.weight",
    }
    queries = c["num_attention_heads"] * c["head_dim"]
    for i, kind in enumerate(c["layer_types"]):  # MiMo-V2.5 has queries, keys and values in one tensor
        heads = c["swa_num_key_value_heads" if kind == SLIDING else "num_key_value_heads"]
        joined, rows = f"blk.{i}.attn_qkv.weight", (queries, heads * widths[1], heads * widths[0])
        apart = {x: f"blk.{i}.attn_{x}.weight" for x in "qkv"}
        value = _widen_part(scale, *widths, sum(rows[:2]), joined)
        ours = f"layers.{i}.attn"
        names[f"{ours}.q.weight"] = (apart["q"], part(0, rows, joined))
        names[f"{ours}.k.weight"] = (apart["k"], part(1, rows, joined))
        names[f"{ours}.v.weight"] = (_widen_rows(scale, *widths, apart["v"]), value)
    return names


def _widen_part(scale: float, narrow: int, wide: int, start: int, source: str) -> Derived:
    """The same of the last rows of a tensor."""
    usual = _widen_rows(scale, narrow, wide, source)
    return Derived(lambda w, **_: usual.fn(take_rows(w, start, w.shape[0])), (source,))


@gguf_arch(
    "mimo2",
    "MiMoV2FlashForCausalLM",
    names=_gguf_names,
    by_layer={"attention.head_count_kv": "kv_heads"},
    is_written=False,
)
def _mimo_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=True)
    for kind, heads in sizes_by_kind(m, "attention.head_count_kv").items():
        key = "swa_num_key_value_heads" if kind == SLIDING else "num_key_value_heads"
        m.put(key, heads, f"{FILE} {m.prefix}attention.head_count_kv")
    m.take("v_head_dim", "attention.value_length", m.config["head_dim"])
    m.take("attention_value_scale", "attention.value_scale", 1.0)
    m.take("rope_local_base_freq", "rope.freq_base_swa", 1e4)
