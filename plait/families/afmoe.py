"""AFMoE (Trinity): windows with positions, whole layers without; gates, and norms around every mixer."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import expert_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, shared_moe
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import Metadata, check_router, gguf_arch, windows
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec

L, FFN = "model.layers.{i}", "layers.{i}.ffn"
MLP = f"{L}.mlp"


@family(
    "AfmoeForCausalLM",
    model_types=("afmoe",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "mup_enabled": False,
    },
    honours=("sliding_window", "mup_enabled"),
)
def afmoe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Trinity Nano, Mini and Large."""
    require(c, "AFMoE", route_norm=(True,), score_func=("sigmoid",), n_group=(1,))
    each = norm(c)
    attns = {SLIDING: gqa(c, SLIDING, qk_norm=each, gate=True)}
    attns[FULL] = gqa(c, FULL, qk_norm=each, gate=True, rope=None)
    router = RouterSpec("sigmoid", True, 1e-20, float(c["routed_scaling_factor"]))
    moe = shared_moe(c, router)
    ffns = {"sparse": BranchSpec("ffn", moe, each, each), "dense": BranchSpec("ffn", mlp(c), each, each)}
    kinds = zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    layers = [(BranchSpec("attn", attns[kind], each, each), ffns[feed]) for kind, feed in kinds]
    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_attention_layernorm",
        f"{FFN}.norm": f"{L}.pre_mlp_layernorm",
        f"{FFN}.post_norm": f"{L}.post_mlp_layernorm",
        f"{FFN}.router": f"{MLP}.router.gate",
        f"{FFN}.router_bias": f"{MLP}.expert_bias",
        f"{FFN}.shared.{{x}}": f"{MLP}.shared_experts.{{x}}_proj",
        **expert_tensors(FFN, MLP, c["num_experts"]),
    }
    spec = model(c, "afmoe", layers, embed_scale=c["hidden_size"] ** 0.5 if c["mup_enabled"] else 1.0)
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


@gguf_arch(
    "afmoe",
    "AfmoeForCausalLM",
    constants={"mup_enabled": True},
    names=lambda c: {"layers.{i}.attn.gate": "blk.{i}.attn_gate"},
)
def _afmoe_in_gguf(m: Metadata) -> None:
    windows(m, 4)
    check_router(m, "sigmoid", renormalizes=True)
