"""DiffLlama: Llama with differential attention."""

from __future__ import annotations

import math
from dataclasses import fields

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.spec.attention import DifferenceSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, NormSpec


def _infer_sizes(t: Tensors) -> None:
    """The vectors of λ are as wide as a head."""
    found = t.need("self_attn.lambda_q1")
    t.size("head_dim", found[1][0], found)


@family(
    "DiffLlamaForCausalLM",
    model_types=("diffllama",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu"},
    detection=Detection(markers=(Marker(("self_attn.lambda_q1",), order=18),), sizes=_infer_sizes),
)
def diffllama(c: Config) -> tuple[ModelSpec, NameMap]:
    """What is taken away begins small, and grows with a layer's depth."""
    heads, groups, each = c["num_attention_heads"], c["num_key_value_heads"], norm(c)
    if heads % 2 or groups % 2:
        raise UnsupportedModel(f"heads are subtracted in pairs, and {heads} or {groups} key heads are odd")
    usual, ffn = gqa(c), BranchSpec("ffn", mlp(c), each)
    told = {field.name: getattr(usual, field.name) for field in fields(AttentionSpec)}
    inner = NormSpec(c["norm_eps"], weight=False)
    layers = [
        (BranchSpec("attn", DifferenceSpec(**told, balance=find_balance(i), norm=inner), each), ffn)
        for i in range(len(c["layer_types"]))
    ]
    names = {
        f"layers.{{i}}.attn.lambda_{x}": f"model.layers.{{i}}.self_attn.lambda_{x}"
        for x in ("q1", "k1", "q2", "k2")
    }
    return model(c, "diffllama", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


def find_balance(i: int) -> float:
    return 0.8 - 0.6 * math.exp(-0.3 * i)
