"""Jet-Nemotron: Qwen2's layers, in most of which a JetBlock stands for attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import negative_exp, reorder_rows, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import FULL, LINEAR, SLIDING, Config
from plait.spec.model import BranchSpec, Mixer, ModelSpec, NormSpec
from plait.spec.recurrent import JetSpec

L, JET = "model.layers.{i}", "layers.{i}.jet"


@family(
    "JetNemotronForCausalLM",
    model_types=("jet_nemotron",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True},
    honours=("sliding_window",),
)
def jet_nemotron(c: Config) -> tuple[ModelSpec, NameMap]:
    """Jet-Nemotron 2B and 4B. A query of a window sees itself and `window_size` keys before it."""
    efficient, each = c["efficient_attention_config"], norm(c)
    jet = _jet(efficient.get("jet") or {})
    attns: dict[str, Mixer] = {FULL: gqa(c), LINEAR: jet}
    if SLIDING in c["layer_types"]:
        attns[SLIDING] = gqa(c, window=int(efficient["swa"]["window_size"]) + 1)
    names = {kind: "jet" if kind == LINEAR else "attn" for kind in attns}
    ffn = BranchSpec("ffn", mlp(c), each)
    layers = [(BranchSpec(names[kind], attns[kind], each), ffn) for kind in c["layer_types"]]
    return model(c, "jet_nemotron", layers), NameMap(_names(jet), transformer(), ignored=unused_patterns(c))


def _jet(told: Mapping[str, str | float]) -> JetSpec:
    """From the words of `efficient_attention_config`; where it is silent, those of the 2B model."""
    heads, dim, taps = (
        int(told.get(k, v)) for k, v in (("num_heads", 12), ("head_dim", 96), ("conv_size", 4))
    )
    values = int(dim * float(told.get("expand_v", 2.0)))
    reduction = int(told.get("dconv_generator_reduction", 8))
    if min(heads, dim, values, reduction) < 1 or taps < 2:
        raise UnsupportedModel(
            f"efficient_attention_config {told!r} has a size below 1, or less than two taps"
        )
    rank, eps = heads * values // reduction, float(told.get("norm_eps", 1e-5))
    return JetSpec(heads, heads, dim, values, taps, NormSpec(eps), rank=rank)


def _names(jet: JetSpec) -> Rules:
    mix, taps = f"{L}.self_attn", f"{L}.self_attn.dynamic_conv1d.kernel_generator"
    channels = jet.num_heads * jet.value_dim
    by_tap = torch.arange(channels * jet.conv_kernel).view(channels, -1).T.flatten()
    letters = {"q": "q", "k": "k", "v": "v", "decay": "a", "beta": "b", "gate": "g", "o": "o"}
    return {
        f"{JET}.norm": f"{L}.input_layernorm",
        **{f"{JET}.{ours}": f"{mix}.{theirs}_proj" for ours, theirs in letters.items()},
        f"{JET}.gated_norm": f"{mix}.o_norm",
        f"{JET}.A": negative_exp(f"{mix}.A_log"),
        f"{JET}.dt_bias": f"{mix}.dt_bias",
        f"{JET}.taps.down": f"{taps}.w1",
        **{f"{JET}.taps.up.{x}": reorder_rows(by_tap, f"{taps}.w2.{x}") for x in ("weight", "bias")},
    }
