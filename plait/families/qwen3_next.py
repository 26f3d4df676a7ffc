"""Qwen3-Next and Qwen3.5, dense and sparse: gated DeltaNet in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Callable

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import QWEN_SHARED, HfConfig, sparse_list
from plait.families.common.mtp import mtp_names
from plait.families.common.recipes import at, expert_tensors, plus_one, text_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, softmax_moe
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.families.linear_attention import (
    DELTA,
    delta_net,
    delta_sizes,
    delta_tensors,
    gated_q,
    gguf_delta_tensors,
    per_head,
    rows,
    select_rows,
)
from plait.spec.model import BranchSpec, ModelSpec, MtpSpec

SHARED = {
    **DELTA,
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "delta_tiled": False,
}
SPARSE = {"norm_topk_prob": True, "num_experts_per_tok": 10, "shared_intermediate_size": 512}
HONOURS = ("attn_output_gate",)
FFN, ATTN, MIX, B = "layers.{i}.ffn", "layers.{i}.attn", "layers.{i}.delta", "blk.{i}"
OTHERS = (r"^(model\.)?mtp\.", r"^(model\.)?visual\.")  # a second token's predictor; what sees images


@family(
    "Qwen3NextForCausalLM",
    model_types=("qwen3_next",),
    defaults={**SHARED, **SPARSE},
    honours=HONOURS,
    detection=Detection(
        markers=(Marker(("linear_attn.in_proj_qkvz.weight",), order=140),),
        kinds={"linear_attn.A_log": LINEAR},
        usual={"rope_theta": 1e7, "max_position_embeddings": 262_144, "norm_topk_prob": True},
    ),
    hf=HfConfig(words=QWEN_SHARED, extra=sparse_list),
)
def qwen3_next(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3-Next: experts with a gated shared one. Rows of one key head lie together in a weight matrix."""
    return _qwen(c, "qwen3_next", group_rules)


@family(
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text", "qwen3_5"),
    defaults=SHARED,
    honours=HONOURS,
    detection=Detection(
        markers=(Marker(("linear_attn.in_proj_qkv.weight",), order=160),),
        usual={"rope_theta": 1e7, "max_position_embeddings": 262_144},
    ),
)
def qwen3_5(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3.5, alone or inside its multimodal wrapper, where positions of text are plain ones."""
    return _qwen(c, "qwen3_5", plain_projections)


@family(
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    defaults={**SHARED, **SPARSE, "num_experts_per_tok": 8},
    honours=HONOURS,
    detection=Detection(
        markers=(
            Marker(("linear_attn.in_proj_qkv.weight",), test=lambda t: t.has("mlp.gate.weight"), order=150),
        ),
        usual={"rope_theta": 1e7, "max_position_embeddings": 262_144},
    ),
    hf=HfConfig(words=QWEN_SHARED),
)
def qwen3_5_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3.5 with experts."""
    return _qwen(c, "qwen3_5_moe", plain_projections)


def _qwen(c: Config, name: str, projections: Callable[[Config, str], Rules]) -> tuple[ModelSpec, NameMap]:
    each, heads = norm(c), c["linear_num_value_heads"]
    tiled = bool(c["delta_tiled"]) and heads != c["linear_num_key_heads"]

    def mixer(kind: str) -> BranchSpec:
        if kind == LINEAR:
            return BranchSpec("delta", delta_net(c, tiled=tiled), each)
        return BranchSpec("attn", gqa(c, kind, qk_norm=each, gate=bool(c["attn_output_gate"])), each)

    def ffn(sort: str) -> BranchSpec:
        if sort == "dense":
            return BranchSpec("ffn", mlp(c), each)
        shared = mlp(c, c["shared_intermediate_size"])
        return BranchSpec("ffn", softmax_moe(c, shared=shared, shared_gate=True), each)

    kinds = c["layer_types"]
    sorts = c["mlp_layer_types"] if c.get("num_experts") else ["dense"] * len(kinds)
    layers = [(mixer(kind), ffn(sort)) for kind, sort in zip(kinds, sorts, strict=True)]
    names = text_tensors(lambda prefix: name_tensors(c, prefix, projections))
    head = (mixer(FULL), ffn("sparse" if c.get("num_experts") else "dense"))
    # Tables of its own are in no published file, and their layout is not known.
    mtp = None if c.get("mtp_use_dedicated_embeddings") else MtpSpec((head,), each)
    heads_names = at(("mtp.", "model.mtp."), lambda prefix: _mtp_names(c, prefix, projections))
    ignored = unused_patterns(c, *OTHERS)
    return model(c, name, layers, mtp=mtp), NameMap(names, heads_names, ignored=ignored)


def _mtp_names(c: Config, prefix: str, projections: Callable[[Config, str], Rules]) -> Rules:
    parts: dict[str, Source] = {
        "embed_norm.weight": plus_one(f"{prefix}pre_fc_norm_embedding.weight"),
        "hidden_norm.weight": plus_one(f"{prefix}pre_fc_norm_hidden.weight"),
        "fc": f"{prefix}fc",
        "norm.weight": plus_one(f"{prefix}norm.weight"),
    }
    return mtp_names(parts, name_tensors(c, prefix, projections))


def name_tensors(c: Config, prefix: str, projections: Callable[[Config, str], Rules]) -> Rules:
    """Ours to theirs, below `prefix`; projections: the names of what the delta rule reads."""
    layer = f"{prefix}layers.{{i}}"
    attention, linear, mlp_of = f"{layer}.self_attn", f"{layer}.linear_attn", f"{layer}.mlp"
    q = gated_q(c, ATTN, f"{attention}.q_proj") if c["attn_output_gate"] else {}
    return {
        "norm.weight": plus_one(f"{prefix}norm.weight"),
        "layers.{i}.ffn.norm.weight": plus_one(f"{layer}.post_attention_layernorm.weight"),
        "layers.{i}.{branch}.norm.weight": plus_one(f"{layer}.input_layernorm.weight"),
        f"{ATTN}.{{x}}_norm.weight": plus_one(f"{attention}.{{x}}_norm.weight"),
        "embed": f"{prefix}embed_tokens",
        **projections(c, linear),
        **delta_tensors(MIX, linear),
        f"{MIX}.gated_norm": f"{linear}.norm",
        f"{MIX}.o": f"{linear}.out_proj",
        **q,
        f"{ATTN}.{{x}}": f"{attention}.{{x}}_proj",
        f"{FFN}.router": f"{mlp_of}.gate",
        **expert_tensors(FFN, mlp_of, c.get("num_experts") or 1),
        f"{FFN}.shared_gate": f"{mlp_of}.shared_expert_gate",
        f"{FFN}.shared.{{x}}": f"{mlp_of}.shared_expert.{{x}}_proj",
        f"{FFN}.{{x}}": f"{mlp_of}.{{x}}_proj",
    }


def group_rules(c: Config, theirs: str) -> Rules:
    return {**_qkvz(c, f"{theirs}.in_proj_qkvz.weight"), **_ba(c, f"{theirs}.in_proj_ba.weight")}


def _qkvz(c: Config, source: str) -> dict[str, Source]:
    keys, dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
    parts = zip(("q", "k", "v", "gate"), per_head(keys, (dim, dim, values, values)), strict=True)
    return {f"{MIX}.{x}.weight": select_rows(index, source) for x, index in parts}


def _ba(c: Config, source: str) -> dict[str, Source]:
    keys, ratio = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    parts = zip(("beta", "decay"), per_head(keys, (ratio, ratio)), strict=True)
    return {f"{MIX}.{x}.weight": select_rows(index, source) for x, index in parts}


def plain_projections(c: Config, theirs: str) -> Rules:
    """What the delta rule reads, each part's rows together (Qwen3.5)."""
    return {
        **_qkv(c, f"{theirs}.in_proj_qkv.weight"),
        f"{MIX}.gate": f"{theirs}.in_proj_z",
        f"{MIX}.beta": f"{theirs}.in_proj_b",
        f"{MIX}.decay": f"{theirs}.in_proj_a",
    }


def _qkv(c: Config, source: str) -> dict[str, Source]:
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return {
        f"{MIX}.q.weight": rows(0, keys, source),
        f"{MIX}.k.weight": rows(keys, 2 * keys, source),
        f"{MIX}.v.weight": rows(2 * keys, 2 * keys + values, source),
    }


def _gguf_names(c: Config) -> Rules:
    return {"layers.{i}.ffn.norm": f"{B}.post_attention_norm", **gguf_names_of_delta(c)}


def gguf_names_of_delta(c: Config) -> Rules:
    """Projections of both mixers, where they are in one tensor."""
    return {
        **gated_q(c, ATTN, f"{B}.attn_q"),
        **_qkv(c, f"{B}.attn_qkv.weight"),
        f"{MIX}.gate.weight": f"{B}.attn_gate.weight",
        f"{MIX}.beta.weight": f"{B}.ssm_beta.weight",
        f"{MIX}.decay.weight": f"{B}.ssm_alpha.weight",
        **gguf_delta_tensors(MIX, B),
    }


def _gguf_names_of_next(c: Config) -> Rules:
    """b and a of one key head lie together; in old files so do q, k, v and z."""
    apart: dict[str, Source] = {
        **_qkv(c, f"{B}.attn_qkv.weight"),
        f"{MIX}.gate.weight": f"{B}.attn_gate.weight",
    }
    whole = _qkvz(c, f"{B}.ssm_in.weight")
    both: Rules = {key: (source, whole[key]) for key, source in apart.items()}
    return {**_gguf_names(c), **both, **_ba(c, f"{B}.ssm_ba.weight")}


@gguf_arch("qwen3next", "Qwen3NextForCausalLM", names=_gguf_names_of_next)
def _qwen3next(m: Metadata) -> None:
    delta_sizes(m)


@gguf_arch("qwen35", "Qwen3_5ForCausalLM", names=_gguf_names)
def _qwen35(m: Metadata) -> None:
    delta_sizes(m)
    m.put("delta_tiled", True, f"default (the {m.arch} format)")


@gguf_arch("qwen35moe", "Qwen3_5MoeForCausalLM", names=_gguf_names)
def _qwen35moe(m: Metadata) -> None:
    _qwen35(m)
