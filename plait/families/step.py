"""Step 3.5 and the text of Step 3.7: windows with more heads, a gate for each head, clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import at, expert, plus_one, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, require_silu
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, sizes_by_kind
from plait.spec.model import Activation, AttentionSpec, BranchSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec

FFN, ATTN = "layers.{i}.ffn", "layers.{i}.attn"
CLAMPED: dict[float, Activation] = {7.0: "swiglu_7", 16.0: "swiglu_16"}
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
UNUSED = (r"^(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\.",)


@family(
    *("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    model_types=("step3p5", "step3p7"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 128, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "share_expert_dim": 1280},
    honours=("sliding_window", "per_layer_config", "query_pre_attn_scalar", "partial_rotary_factor"),
)
def step(c: Config) -> tuple[ModelSpec, NameMap]:
    """Step 3.5 Flash. Layers behind the last one draft tokens, and are left out."""
    require_silu(c, "Step")
    require(c, "Step", att_impl_type=("GQA",), moe_router_activation=("sigmoid",), need_fp32_gate=(True,))
    require(
        c, "Step", norm_expert_weight=(True,), use_moe_router_bias=(True,), use_head_wise_attn_gate=(True,)
    )
    each, count = norm(c), len(c["layer_types"])
    kinds = find_kinds(c, count)
    layers = [
        (
            BranchSpec("attn", _attention(c, i, kind), each),
            BranchSpec("ffn", _experts(c, i) if kinds[i] == "sparse" else _dense(c, i), each),
        )
        for i, kind in enumerate(c["layer_types"])
    ]
    drafts = range(count, count + (c.get("num_nextn_predict_layers") or 0))
    unused = (*UNUSED, *(rf"^(model\.)?(language_model\.)?(model\.)?layers\.{i}\." for i in drafts))
    names = at(PREFIXES, lambda prefix: _names(c, prefix))
    return model(c, "step3p5", layers), NameMap(names, ignored=unused_patterns(c, *unused))


def find_kinds(c: Config, count: int) -> Sequence[str]:
    """ "dense" or "sparse" for each layer; older configs count those with experts."""
    listed = c.get("moe_layers_enum")
    if listed is None:
        kinds: Sequence[str] = c["mlp_layer_types"]
        return kinds
    numbers = {int(i) for i in (listed.split(",") if isinstance(listed, str) else listed) if str(i).strip()}
    return ["sparse" if i in numbers else "dense" for i in range(count)]


def _own_heads(c: Config, i: int) -> int | None:
    """The heads that `per_layer_config` gives a layer: in transformers they win. Raises UnsupportedModel."""
    own: dict[str, int] = (c.get("per_layer_config") or {}).get(str(i)) or {}
    if odd := sorted(own.keys() - {"num_attention_heads"}):
        raise UnsupportedModel(f"per_layer_config has {odd}; known of Step: num_attention_heads")
    return own.get("num_attention_heads")


def _attention(c: Config, i: int, kind: str) -> AttentionSpec:
    p = c["rope_parameters"].get(kind) or c["rope_parameters"][FULL]
    thetas, shares = p["rope_theta"], c.get("partial_rotary_factors")
    turns = {**p, "rope_theta": thetas[i] if isinstance(thetas, list) else thetas}
    turns |= {"partial_rotary_factor": shares[i]} if shares else {}
    if kind not in (c.get("yarn_only_types") or (kind,)):
        turns = {key: turns[key] for key in ("rope_theta", "partial_rotary_factor")} | {
            "rope_type": "default"
        }
    own = c | {"rope_parameters": {FULL: turns}}
    other = c.get("attention_other_setting") or {}
    if told := _own_heads(c, i):
        own["num_attention_heads"] = told
    elif kind == SLIDING:
        heads = c.get("num_sliding_attention_heads") or other.get("num_attention_heads")
        own["num_attention_heads"] = heads or c["num_attention_heads"]
    if kind == SLIDING:
        own["num_key_value_heads"] = other.get("num_attention_groups") or c["num_key_value_heads"]
    scale = float(c.get("query_pre_attn_scalar") or c["head_dim"]) ** -0.5
    rotates = (c.get("use_rope_layers") or [True] * (i + 1))[i]
    found = gqa(own, kind, qk_norm=norm(c), head_gate="sigmoid", scale=scale)
    return found if rotates else replace(found, rope=None)


def _activation(c: Config, key: str, i: int) -> Activation:
    limit = float((c.get(key) or [0.0] * (i + 1))[i] or 0.0)
    if limit and limit not in CLAMPED:
        raise UnsupportedModel(f"{key} has {limit:g} for layer {i}; known: none, 7 and 16")
    found: Activation = CLAMPED[limit] if limit else c["hidden_act"]
    return found


def _dense(c: Config, i: int) -> MlpSpec:
    return replace(mlp(c), activation=_activation(c, "swiglu_limits_shared", i))


def _experts(c: Config, i: int) -> MoeSpec:
    one = replace(mlp(c, c["moe_intermediate_size"]), activation=_activation(c, "swiglu_limits", i))
    shared = replace(_dense(c, i), size=c["share_expert_dim"])
    router = RouterSpec("sigmoid", True, 0.0, float(c["routed_scaling_factor"]))
    return MoeSpec(c["num_experts"], c["num_experts_per_tok"], one, router, shared=shared)


def _names(c: Config, prefix: str) -> Rules:
    layer, count = f"{prefix}layers.{{i}}", c.get("num_experts") or 1
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": f"{prefix}embed_tokens",
        "norm.weight": plus_one(f"{prefix}norm.weight"),
        "head": "lm_head",
        f"{ATTN}.norm.weight": plus_one(f"{layer}.input_layernorm.weight"),
        f"{FFN}.norm.weight": plus_one(f"{layer}.post_attention_layernorm.weight"),
        **{f"{ATTN}.{x}_norm.weight": plus_one(f"{layer}.self_attn.{x}_norm.weight") for x in "qk"},
        **{f"{ATTN}.{x}": f"{layer}.self_attn.{x}_proj" for x in "qkvo"},
        f"{ATTN}.head_gate": f"{layer}.self_attn.g_proj",
        f"{FFN}.router_bias": f"{layer}.moe.router_bias",
        f"{FFN}.router": f"{layer}.moe.gate",
        f"{FFN}.shared.{{x}}": f"{layer}.share_expert.{{x}}_proj",
    }
    for x in ("gate", "up", "down"):
        stacked, one = f"{layer}.moe.{x}_proj.weight", f"{layer}.moe.experts.{{e}}.{x}_proj.weight"
        names[f"{FFN}.experts.{{e}}.{x}.weight"] = (expert(count, stacked), one)
    names[f"{FFN}.{{x}}"] = f"{layer}.mlp.{{x}}_proj"
    return names


@gguf_arch(
    "step35",
    "Step3p5ForCausalLM",
    names=lambda c: {f"{ATTN}.head_gate": "blk.{i}.attn_gate"},
    by_layer={"attention.head_count": "heads", "attention.head_count_kv": "kv_heads"},
    is_written=False,
)
def _step_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=True)
    for ours, theirs in (("num_attention_heads", "head_count"), ("num_key_value_heads", "head_count_kv")):
        sizes = sizes_by_kind(m, f"attention.{theirs}")
        m.put(ours, sizes.get(FULL, max(sizes.values())), f"{FILE} {m.prefix}attention.{theirs}")
        if near := sizes.get(SLIDING):
            word = "num_attention_heads" if theirs == "head_count" else "num_attention_groups"
            other = {**m.config.get("attention_other_setting", {}), word: near}
            m.put("attention_other_setting", other, f"{FILE} {m.prefix}attention.{theirs}")
    m.size("share_expert_dim", "ffn_up_shexp.weight", 0)
    for ours, theirs in (
        ("swiglu_limits", "swiglu_clamp_exp"),
        ("swiglu_limits_shared", "swiglu_clamp_shexp"),
    ):
        told = m.values.get(theirs) or 0.0
        each = told if isinstance(told, list) else [told] * m.config["num_hidden_layers"]
        m.put(ours, each, f"{FILE} {m.prefix}{theirs}")
    _turns_in_gguf(m)


def _turns_in_gguf(m: Metadata) -> None:
    """Layers without windows turn half of what the others do, and theirs alone are scaled."""
    dim, base = m.config["head_dim"], m.config.get("rope_theta", 1e4)
    wide = m.values.get("rope.dimension_count", dim)
    scaling = dict(m.config.get("rope_scaling") or {})
    if divisors := scaling.get("divisors"):
        scaling["divisors"] = divisors[: wide // 4]
    near = m.values.get("rope.dimension_count_swa", wide)
    turned = {
        FULL: {**scaling, "rope_theta": base, "partial_rotary_factor": wide / 2 / dim},
        SLIDING: {
            "rope_theta": m.values.get("rope.freq_base_swa", base),
            "partial_rotary_factor": near / dim,
        },
    }
    m.put("rope_parameters", turned, f"{FILE} {m.prefix}rope")
