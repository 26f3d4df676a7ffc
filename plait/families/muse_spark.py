"""Muse Spark (text): Muse Glimmer with experts in a latent space, and gates of residuals and branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.families.common.recipes import (
    attention_tensors,
    ends,
    expert_tensors,
    fill,
    plus_one,
    scale_tensor,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.muse_glimmer import find_kinds, find_turned
from plait.quant.weight import as_tensor
from plait.spec.attention import NormedHeadsSpec
from plait.spec.branches import ScaledSpec
from plait.spec.model import BranchSpec, Mixer, ModelSpec, NormSpec, RouterSpec
from plait.spec.moe import NormedMoeSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
LEAST = 1e-3  # what the square of a residual's factor is at least
RENORM_EPS = 1e-15


@family(
    "MuseSparkForConditionalGeneration",
    model_types=("muse_spark_text", "muse_spark"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 64,
        "rope_theta": 5e5,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.1767766952966369,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 5.4730064863875,
        "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "residual_gate_temperature": 0.3,
    },
    honours=(
        *("sliding_window", "final_logit_softcapping", "layer_rope_theta", "moe_hidden_size"),
        "residual_gate_temperature",
    ),
)
def muse_spark(c: Config) -> tuple[ModelSpec, NameMap]:
    """Each number of a state and of what is added to it has a factor, by one gate for both."""
    each, bare = norm(c), NormSpec(c["norm_eps"], weight=False)
    kinds, whole = find_kinds(c)
    feeds = {"dense": mlp(c), "sparse": _moe(c)}
    ffn = {kind: _gate("ffn", mixer, each, _scale_first(c)) for kind, mixer in feeds.items()}
    layers = []
    for kind, turned, feed in zip(
        kinds, find_turned(c, [not one for one in whole]), c["mlp_layer_types"], strict=True
    ):
        usual = gqa(c, kind, qk_norm=bare, gate=True)
        usual = replace(usual, scale=usual.scale * c["qk_scale_factor"])
        usual = usual if turned else replace(usual, rope=None)
        own = {field.name: getattr(usual, field.name) for field in fields(usual)}
        behind = NormSpec(c["post_norm_eps"], weight=False)
        layers.append((_gate("attn", NormedHeadsSpec(**own, each_norm=bare), each, behind), ffn[feed]))
    scales = {"logit_scale": float(c["output_multiplier"]), "logit_softcap": c["final_logit_softcapping"]}
    spec = model(c, "muse_spark_text", layers, embed_norm=bare, **scales)
    return spec, NameMap(_names(c), ignored=unused_patterns(c))


def _gate(name: str, mixer: Mixer, before: NormSpec, behind: NormSpec) -> BranchSpec:
    return BranchSpec(name, ScaledSpec({"inner": mixer}, norm=before, post_norm=behind), None)


def _scale_first(c: Config) -> NormSpec:
    return NormSpec(c["post_norm_eps"], "scaled")


def _moe(c: Config) -> NormedMoeSpec:
    return NormedMoeSpec(
        c["num_experts"],
        c["num_experts_per_tok"],
        mlp(c, c["moe_intermediate_size"]),
        RouterSpec("sigmoid", True, RENORM_EPS, float(c["routed_scaling_factor"])),
        latent=c["moe_hidden_size"],
        enter_norm=norm(c),
        give_norm=_scale_first(c),
    )


def _names(c: Config) -> Rules:
    hidden, theirs = c["hidden_size"], f"{L}.mlp"
    norms = {
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.pre_feedforward_layernorm",
        f"{FFN}.post_norm": f"{L}.post_feedforward_layernorm",
        f"{FFN}.inner.enter_norm": f"{theirs}.pre_expert_norm",
        f"{FFN}.inner.give_norm": f"{theirs}.experts.post_expert_norm",
    }
    found: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.weight": plus_one(f"{name}.weight") for ours, name in norms.items()
    }
    for ours, place in ((ATTN, "attention"), (FFN, "feedforward")):
        gate = f"{L}.post_{place}_residual_gate.gate"
        found |= {
            f"{ours}.stays.scale": _rate(c, gate, _keep),
            f"{ours}.added.scale": _rate(c, gate, torch.sigmoid),
            **{f"{ours}.{which}.shift": fill(0.0, hidden) for which in ("stays", "added")},
        }
    return {
        **found,
        f"{FFN}.inner.router_bias": f"{theirs}.gate.e_score_correction_bias",
        f"{FFN}.inner.router.weight": scale_tensor(float(c["output_multiplier"]), f"{theirs}.gate.weight"),
        f"{FFN}.inner.enter": f"{theirs}.pre_expert_proj",
        f"{FFN}.inner.leave": f"{theirs}.post_expert_proj",
        **expert_tensors(f"{FFN}.inner", theirs, c["num_experts"]),
        f"{FFN}.inner.{{x}}": f"{theirs}.{{x}}_proj",
        **attention_tensors(f"{ATTN}.inner", f"{L}.self_attn"),
        **ends(),
    }


def _rate(c: Config, source: str, how: Callable[[Tensor], Tensor]) -> Derived:
    """A factor of each number, from the one gate that both are made of; it comes back of what is added."""
    heat = float(c["residual_gate_temperature"])
    back = Back(lambda factor: factor.logit() * heat) if how is torch.sigmoid else None
    return Derived(lambda gate, **_: how(as_tensor(gate).float() / heat), (source,), (back,))


def _keep(w: Tensor) -> Tensor:
    """√((1 - b) (1 + b)) of b = sigmoid(w), so that squares of both factors sum to one."""
    return (torch.sigmoid(-w) * (1 + torch.sigmoid(w))).clamp(min=LEAST).sqrt()
