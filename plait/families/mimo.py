"""MiMo 7B: Qwen2 with a head that drafts. MiMo-V2-Flash: windows with sinks and twice the heads of keys and
values, which are narrower than keys."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import Stored, expert_tensors, part, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, sizes_by_kind
from plait.families.llama import QWEN, dense
from plait.quant.weight import as_tensor, take_rows
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, MtpSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"
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
    },
    honours=("sliding_window",),
)
def mimo_v2_flash(c: Config) -> tuple[ModelSpec, NameMap]:
    """Values are padded to the width of keys, and scaled, while they load."""
    each, heads, size = norm(c), c["num_key_value_heads"], c["moe_intermediate_size"]
    c.setdefault("routed_scaling_factor", 1.0)
    if c["v_head_dim"] > c["head_dim"]:
        raise UnsupportedModel(
            f"v_head_dim = {c['v_head_dim']} is wider than head_dim = {c['head_dim']}, which is not "
            "implemented for MiMo-V2; correct one with --set v_head_dim=VALUE"
        )
    near = c.get("swa_num_key_value_heads") or 2 * heads
    attns = {FULL: gqa(c, FULL), SLIDING: gqa(c, SLIDING, num_kv_heads=near, sinks=True)}
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
    return model(c, "mimo_v2_flash", layers, mtp=mtp), NameMap(names, transformer(), head, ignored=unused)


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    attn, mlp_at = f"{layer}.self_attn", f"{layer}.mlp"
    scale, widths = c["attention_value_scale"] or 1.0, (c["v_head_dim"], c["head_dim"])
    return {
        **{f"{ATTN}.v.{x}": _widen_rows(scale, *widths, f"{attn}.v_proj.{x}") for x in ("weight", "bias")},
        f"{ATTN}.o.weight": _widen_columns(*widths, f"{attn}.o_proj.weight"),
        f"{ATTN}.sinks": (f"{attn}.attention_sink_bias", f"{attn}.sinks"),
        f"{FFN}.router": f"{mlp_at}.gate",
        f"{FFN}.router_bias": f"{mlp_at}.gate.e_score_correction_bias",
        **expert_tensors(FFN, mlp_at, c["num_experts"]),
    }


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
