"""Step 3: one key and value head, queries of a low rank, and experts next to a shared one."""

from __future__ import annotations

from dataclasses import fields

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import at, ends, expert, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, require_silu
from plait.families.config.normalize import FULL, Config
from plait.families.step import PREFIXES, find_kinds
from plait.spec.attention import LowRankSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, MoeSpec, RouterSpec

FFN, ATTN = "layers.{i}.ffn", "layers.{i}.attn"
EYES = r"^(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\."
SPARSE = [*range(4, 60)]  # layers with experts, where a config does not list them


@family(
    *("Step3TextForCausalLM", "Step3VLForConditionalGeneration"),
    model_types=("step3_text", "step3_vl"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 256, "num_key_value_heads": 1}
    | {"share_q_dim": 2048, "share_expert_dim": 5120, "norm_expert_weight": False, "rope_theta": 5e5}
    | {"num_experts_per_tok": 3, "moe_layers_enum": SPARSE},
)
def step3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Step 3, alone or with eyes, which are left out."""
    require_silu(c, "Step 3")
    require(c, "Step 3", num_key_value_heads=(1,), norm_expert_weight=(True, False))
    if set(c["layer_types"]) - {FULL}:
        raise UnsupportedModel("Step 3 with windows of keys is not known; all of its layers see all keys")
    if c["moe_layers_enum"] is None:
        c["moe_layers_enum"] = [*range(1, len(c["layer_types"]))]
    each = norm(c)
    layers = [
        (
            BranchSpec("attn", _attention(c), each),
            BranchSpec("ffn", _experts(c) if kind == "sparse" else mlp(c), each),
        )
        for kind in find_kinds(c, len(c["layer_types"]))
    ]
    c["max_position_embeddings"] = c.get("max_position_embeddings") or c.get("max_position_embedding")
    names = at(PREFIXES, lambda prefix: _names(c, prefix))
    return model(c, "step3_text", layers), NameMap(names, ignored=unused_patterns(c, EYES))


def _attention(c: Config) -> LowRankSpec:
    usual, rank = gqa(c), c.get("share_q_dim") or c["head_dim"]
    told = {field.name: getattr(usual, field.name) for field in fields(AttentionSpec)}
    return LowRankSpec(**told, q_rank=rank, q_a_norm=norm(c))


def _experts(c: Config) -> MoeSpec:
    one, shared = mlp(c, c["moe_intermediate_size"]), mlp(c, c["share_expert_dim"])
    router = RouterSpec(renormalize=c["norm_expert_weight"])
    return MoeSpec(c["num_experts"], c["num_experts_per_tok"], one, router, shared=shared)


def _names(c: Config, prefix: str) -> Rules:
    layer, count = f"{prefix}layers.{{i}}", c.get("num_experts") or 1
    names: dict[str, Source | tuple[Source, ...]] = {
        **ends(prefix),
        f"{ATTN}.norm": f"{layer}.input_layernorm",
        f"{FFN}.norm": f"{layer}.post_attention_layernorm",
        f"{ATTN}.q_a_norm": f"{layer}.self_attn.inter_norm",
        f"{ATTN}.q_a": f"{layer}.self_attn.q_proj",
        f"{ATTN}.q": f"{layer}.self_attn.wq",
        **{f"{ATTN}.{x}": f"{layer}.self_attn.{x}_proj" for x in "kvo"},
        f"{FFN}.router": f"{layer}.moe.gate",
        f"{FFN}.shared.{{x}}": f"{layer}.share_expert.{{x}}_proj",
    }
    for x in ("gate", "up", "down"):
        stacked, one = f"{layer}.moe.{x}_proj.weight", f"{layer}.moe.experts.{{e}}.{x}_proj.weight"
        names[f"{FFN}.experts.{{e}}.{x}.weight"] = (expert(count, stacked), one)
    names[f"{FFN}.{{x}}"] = f"{layer}.mlp.{{x}}_proj"
    return names
