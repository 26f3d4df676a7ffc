"""Sarvam: Ling 2.0's layers (30B), DeepSeek-V3's (105B)."""

from __future__ import annotations

from plait.checkpoint.names import NameMap
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, norm, require, sigmoid_router
from plait.families.config.normalize import Config
from plait.families.deepseek import latent_model
from plait.families.ling_moe import ling_names
from plait.families.moe_kin import build_shared_moe
from plait.spec.model import BranchSpec, ModelSpec

SHARED = {
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


@family(
    "SarvamMoEForCausalLM",
    model_types=("sarvam_moe",),
    saved_as=("Glm4MoeForCausalLM",),
    defaults={
        **SHARED,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 6,
        "partial_rotary_factor": 1.0,
        "rope_theta": 8e6,
        "use_qk_norm": True,
    },
    honours=("use_qk_norm",),
)
def sarvam_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Sarvam 30B: Ling 2.0 in which whole heads turn."""
    require(c, "Sarvam", score_function=("sigmoid",))
    attn = BranchSpec("attn", gqa(c, qk_norm=norm(c) if c["use_qk_norm"] else None), norm(c))
    attns = [attn] * len(c["layer_types"])
    return build_shared_moe(c, "sarvam_moe", attns, sigmoid_router(c), ling_names(c))


@family(
    "SarvamMLAForCausalLM",
    model_types=("sarvam_mla",),
    saved_as=("DeepseekV3ForCausalLM",),
    defaults={**SHARED, "num_experts_per_tok": 8, "rope_interleave": True},
)
def sarvam_mla(c: Config) -> tuple[ModelSpec, NameMap]:
    """Sarvam 105B: DeepSeek-V3 without groups of experts."""
    require(c, "Sarvam", score_function=("sigmoid",))
    return latent_model(c, "sarvam_mla", sigmoid_router(c))
