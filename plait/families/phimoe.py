"""Phi-3.5-MoE: Llama with layer norms, and a router that weighs each expert by a softmax of its own."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    either,
    expert_tensors,
    mixtral_experts,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, softmax_moe
from plait.families.config.normalize import Config
from plait.families.gguf.arch import plain_arch
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec

FFN, OLD, NEW = "layers.{i}.ffn", "model.layers.{i}.block_sparse_moe", "model.layers.{i}.mlp"


@family(
    "PhimoeForCausalLM",
    "PhiMoEForCausalLM",
    model_types=("phimoe",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_experts": 16,
        "router_jitter_noise": 0.01,
    },
    honours=("sliding_window",),
)
def phimoe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Phi-3.5-MoE and Phi-tiny-MoE."""
    if c["num_experts_per_tok"] != 2:
        raise UnsupportedModel(f"num_experts_per_tok = {c['num_experts_per_tok']} of PhiMoE: it is always 2")
    each = norm(c, "layer")
    router = RouterSpec(renormalize=False, margin=2 * float(c["router_jitter_noise"]))
    ffn = BranchSpec("ffn", softmax_moe(c, router=router), each)
    layers = [(BranchSpec("attn", gqa(c, kind), each), ffn) for kind in c["layer_types"]]
    count = c["num_experts"]
    names: Rules = {
        f"{FFN}.router": (f"{OLD}.gate", f"{NEW}.gate", f"{NEW}.router"),
        **either(mixtral_experts(FFN, OLD, count), expert_tensors(FFN, NEW, count)),
    }
    spec = model(c, "phimoe", layers, norm=each)
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


plain_arch("phimoe", "PhimoeForCausalLM")
