"""Ouro: layers with norms around each mixer that run several times (Zhu et al. 2025)."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.llama import QWEN
from plait.families.nanbeige import repeat_layers
from plait.spec.model import BranchSpec, ModelSpec

L = "model.layers.{i}"


@family(
    "OuroForCausalLM",
    model_types=("ouro",),
    defaults={
        **QWEN,
        "sliding_window": 4096,
        "max_position_embeddings": 32_768,
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
        "early_exit_step": None,
    },
    honours=("sliding_window",),
)
def ouro(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ouro 1.4B and 2.6B. The last norm of the model is applied behind every step, and the next reads it.

    Each step has keys and values of its own. A gate that may end a token's steps is not read: a token that
    ends early would lack keys and values that later ones read.
    """
    threshold, steps, first = c["early_exit_threshold"], c["total_ut_steps"], c.get("early_exit_step")
    if threshold is not None and threshold < 1:
        raise UnsupportedModel(
            f"early_exit_threshold is {threshold!r}: tokens that end before the last of {steps} steps are "
            "not implemented; --set early_exit_threshold=1.0 runs all steps, as the model is published"
        )
    if first is not None:
        wanted = first + 1 if isinstance(first, int) else "STEPS"
        raise UnsupportedModel(
            f"early_exit_step is {first!r:.40}: it is not implemented; --set early_exit_step=null "
            f"--set total_ut_steps={wanted} has the logits of that step"
        )
    each = norm(c)
    ffn = BranchSpec("ffn", mlp(c), each, each)
    kinds = {kind: BranchSpec("attn", gqa(c, kind), each, each) for kind in set(c["layer_types"])}
    layers = repeat_layers([(kinds[kind], ffn) for kind in c["layer_types"]], steps, "total_ut_steps", each)
    names: Rules = {
        "layers.{i}.cycle.norm": "model.norm",
        "layers.{i}.attn.post_norm": f"{L}.input_layernorm_2",
        "layers.{i}.ffn.post_norm": f"{L}.post_attention_layernorm_2",
        **transformer(),
    }
    gate = r"^model\.early_exit_gate\."
    return model(c, "ouro", layers), NameMap(names, ignored=unused_patterns(c, gate))
