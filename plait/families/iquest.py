"""IQuest-Coder-V1: Llama that may clip; and its loop, of which a second round reads keys of the first."""

from __future__ import annotations

from dataclasses import fields, replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.llama import WINDOWS, dense
from plait.families.nanbeige import repeat_layers
from plait.spec.attention import NearFarSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

USUAL = {"norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 128, "rope_theta": 5e5}


@family(
    "IQuestCoderForCausalLM",
    model_types=("iquestcoder",),
    defaults={**USUAL, **WINDOWS, "max_window_layers": 0, "max_position_embeddings": 16_384},
    honours=("sliding_window", "clip_qkv"),
    saved_as=("LlamaForCausalLM",),  # by transformers, which has its config alone
)
def iquest_coder(c: Config) -> tuple[ModelSpec, NameMap]:
    """IQuest-Coder-V1: queries, keys and values may be clipped; no published model does it."""
    limit = c.get("clip_qkv")
    return dense(c, "iquestcoder", clip=float(limit) if limit else None)


@family(
    "IQuestLoopCoderForCausalLM",
    model_types=("iquestloopcoder",),
    defaults={**USUAL, "max_position_embeddings": 131_072, "loop_num": 2, "loop_window_size": 64},
)
def iquest_loop_coder(c: Config) -> tuple[ModelSpec, NameMap]:
    """The loop of IQuest-Coder-V1. Rounds behind the first attend twice with the same queries.

    Once over keys of their own within a window, and once over all keys of the first round. A gate that each
    head makes of its query mixes both.
    """
    each, count = norm(c), len(c["layer_types"])
    attn, ffn = BranchSpec("attn", gqa(c), each), BranchSpec("ffn", mlp(c), each)
    layers = repeat_layers([(attn, ffn)] * count, c["loop_num"], "loop_num", None)
    for i in range(count, len(layers)):
        first, *others = layers[i]
        mixed = _mix(gqa(c, window=c["loop_window_size"]), f"layers.{i % count}.attn")
        layers[i] = (replace(first, mixer=mixed), *others)
    names: Rules = {"layers.{i}.attn.mix": "model.gate_projections.{i}", **transformer()}
    unread = (r"^model\.gate_projections\.",) if c["loop_num"] == 1 else ()
    return model(c, "iquestloopcoder", layers), NameMap(names, ignored=unused_patterns(c, *unread))


def _mix(usual: AttentionSpec, source: str) -> NearFarSpec:
    return NearFarSpec(**{field.name: getattr(usual, field.name) for field in fields(usual)}, source=source)
