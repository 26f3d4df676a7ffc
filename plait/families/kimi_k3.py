"""Kimi-K3 (text): Kimi-Linear with attention residuals, gated latent attention, experts in a latent space."""

from __future__ import annotations

from plait.checkpoint.names import NameMap
from plait.families.common.detection import Detection, Marker
from plait.families.common.registry import family
from plait.families.config.normalize import LINEAR, Config
from plait.families.kimi import SITU, build_kimi
from plait.spec import ModelSpec


@family(
    *("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"),
    model_types=("kimi_k3",),
    defaults={
        **SITU,
        "norm_eps": 1e-5,
        "hidden_act": "situ",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 2,
        "linear_head_dim": 128,
        "linear_num_heads": 96,
        "linear_conv_kernel_dim": 4,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
    },
    honours=("linear_attn_config",),
    detection=Detection(
        markers=(Marker(("self_attention_res_proj.weight",), order=175, architecture="KimiK3ForCausalLM"),),
        kinds={"self_attn.A_log": LINEAR},
        usual={"max_position_embeddings": 1_048_576},
    ),
)
def kimi_k3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Kimi-K3. How many layers a block has is in no tensor, so a config has to say that."""
    _ = c["attn_res_block_size"]
    return build_kimi(c, "kimi_k3")
