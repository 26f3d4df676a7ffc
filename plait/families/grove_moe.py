"""Grove MoE: of each two experts in a row one more that both have in common."""

from __future__ import annotations

from dataclasses import fields

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import expert, expert_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, softmax_moe
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, check_router, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.moe import GroveMoeSpec

FFN, MLP = "layers.{i}.ffn", "model.layers.{i}.mlp"


@family(
    "GroveMoeForCausalLM",
    model_types=("grove_moe",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "experts_per_group": 2,
        "expert_group_scale": 0.05,
        "chunk_intermediate_size": None,
    },
    honours=("sliding_window",),
)
def grove_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """GroveMoE 33B: Qwen3-MoE with adjugate experts, as wide as a head where the config does not say it."""
    each, usual, group = norm(c), softmax_moe(c), c["experts_per_group"]
    if group < 1 or c["num_experts"] % group:
        raise UnsupportedModel(f"experts_per_group = {group} does not divide {c['num_experts']} experts")
    own = {f.name: getattr(usual, f.name) for f in fields(usual)}
    common = mlp(c, c["chunk_intermediate_size"] or c["head_dim"])
    moe = GroveMoeSpec(**own, group=group, common=common, common_scale=float(c["expert_group_scale"]))
    ffn = BranchSpec("ffn", moe, each)
    layers = [(BranchSpec("attn", gqa(c, kind, qk_norm=each), each), ffn) for kind in c["layer_types"]]
    names: Rules = {
        f"{FFN}.router": f"{MLP}.gate",
        f"{FFN}.common.experts.{{e}}.{{x}}": f"{MLP}.chunk_experts.{{e}}.{{x}}_proj",
        **expert_tensors(FFN, MLP, c["num_experts"]),
    }
    unused = unused_patterns(c, r"\.expert_bias$")  # of no use once a model is trained
    return model(c, "grove_moe", layers), NameMap(names, transformer(), ignored=unused)


def _gguf_names(c: Config) -> Rules:
    count = c["num_experts"] // c["experts_per_group"]
    return {
        f"{FFN}.common.experts.{{e}}.{x}.weight": expert(count, f"blk.{{i}}.ffn_{x}_chexps.weight")
        for x in ("gate", "up", "down")
    }


@gguf_arch("grovemoe", "GroveMoeForCausalLM", names=_gguf_names, is_written=False)
def _grove_in_gguf(m: Metadata) -> None:
    check_router(m, "softmax", renormalizes=True, scales=False)
    m.take("experts_per_group", "experts_per_group")
    m.take("expert_group_scale", "expert_group_scale")
    m.take("chunk_intermediate_size", "expert_chunk_feed_forward_length", None)
