"""openPangu Ultra MoE: DeepSeek-V3 with norms around each mixer, and experts without groups."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import norm, require, sigmoid_router
from plait.families.config.normalize import Config
from plait.families.deepseek import latent_model, latent_names
from plait.spec.model import ModelSpec

L = "model.layers.{i}"
OFF = ("use_mhc", "use_mome")
NONE = ("sliding_window_list", "swa_layers", "dsa_layers", "block_post_layernorm_idx")


@family(
    "PanguUltraMoEForCausalLM",
    model_types=("pangu_ultra_moe",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 2.56e7,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sandwich_norm": False,
    },
)
def pangu_ultra(c: Config) -> tuple[ModelSpec, NameMap]:
    """openPangu Ultra MoE 718B. Later forms with learned keys, streams or convolutions are refused.

    Layers behind the last one, which predict a second token, are not read.
    """
    require(c, "openPangu Ultra MoE", param_sink_number=(0,), n_group=(1,), topk_group=(1,))
    require(c, "openPangu Ultra MoE", **dict.fromkeys(OFF, (False,)), **dict.fromkeys(NONE, ([],)))
    drafts, each = c.pop("num_nextn_predict_layers", 0) or c.get("num_mtp_layers") or 1, norm(c)
    spec, _ = latent_model(c, "pangu_ultra_moe", sigmoid_router(c))
    biases = (f"{L}.mlp.e_score_correction_bias", f"{L}.mlp.gate.e_score_correction_bias")
    names: Rules = {"layers.{i}.ffn.router_bias": biases}
    if c["sandwich_norm"]:
        layers = tuple(tuple(replace(b, post_norm=each) for b in layer) for layer in spec.layers)
        spec = replace(spec, layers=layers)
        own = {"attn.post_norm": "post_attention", "ffn.norm": "pre_mlp", "ffn.post_norm": "post_mlp"}
        names = {**names, **{f"layers.{{i}}.{x}": f"{L}.{theirs}_layernorm" for x, theirs in own.items()}}
    unused = (rf"^model\.layers\.{len(spec.layers) + k}\." for k in range(drafts))
    return spec, NameMap(names, latent_names(c, "model."), ignored=unused_patterns(c, *unused))
