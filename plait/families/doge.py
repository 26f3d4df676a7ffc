"""Doge: attention in which every key has a bias by its values, and residuals with a gain for each channel."""

from __future__ import annotations

from dataclasses import fields

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hyper import move_inside
from plait.families.common.recipes import attention_tensors, ends, fill, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.spec.attention import KeyBiasSpec
from plait.spec.branches import ScaledSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"


def _infer_sizes(t: Tensors) -> None:
    """A has a number for each key head, and a norm the width of one."""
    rate, width = t.need("self_attn.A"), t.need("self_attn.q_norm.weight")
    t.size("num_key_value_heads", rate[1][0], rate)
    t.size("head_dim", width[1][0], width)


@family(
    "DogeForCausalLM",
    model_types=("doge",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "keep_window_size": 2048}
    | {"max_position_embeddings": 2048},
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker(("self_attn.dt_proj.weight", "self_attn.A"), order=17),), sizes=_infer_sizes
    ),
)
def doge(c: Config) -> tuple[ModelSpec, NameMap]:
    """Doge, dense. Beyond `keep_window_size` keys only those with the largest biases take part, which is not
    implemented: sequences end there, as all that was published does."""
    if c.get("is_moe"):
        raise UnsupportedModel(
            "a Doge of experts (is_moe) is not implemented: its router mixes the scores of different tokens, "
            "so what a token of a prompt gets depends on later ones, and on where the prompt is cut"
        )
    if (most := int(c["keep_window_size"])) < 1:
        raise UnsupportedModel(f"keep_window_size = {most}; a number of keys, 1 or more, is known")
    each, layers = norm(c), []
    for kind in c["layer_types"]:
        usual = gqa(c, kind, qk_norm=each)
        known = {field.name: getattr(usual, field.name) for field in fields(AttentionSpec)}
        parts = {"attn": KeyBiasSpec(**known), "ffn": mlp(c)}
        layers.append(
            tuple(BranchSpec(x, ScaledSpec({"inner": part}, norm=each), None) for x, part in parts.items())
        )
    longest = min(most, c["max_position_embeddings"])
    names = NameMap(_names(c["hidden_size"]), ends(), ignored=unused_patterns(c))
    return model(c, "doge", layers, max_len=longest), names


def _names(hidden: int) -> Rules:
    theirs = f"{L}.self_attn"
    inside: Rules = {
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        f"{ATTN}.dt": f"{theirs}.dt_proj",
        f"{ATTN}.A": f"{theirs}.A",
        **attention_tensors(ATTN, theirs),
        f"{FFN}.{{x}}": f"{L}.mlp.{{x}}_proj",
    }
    return {
        **{
            f"{ours}.stays.scale": f"{L}.{gain}_residual"
            for ours, gain in ((ATTN, "input"), (FFN, "post_attention"))
        },
        **{f"{ours}.stays.shift": fill(0.0, hidden) for ours in (ATTN, FFN)},
        **{f"{ours}.added.scale": fill(1.0, hidden) for ours in (ATTN, FFN)},
        **{f"{ours}.added.shift": fill(0.0, hidden) for ours in (ATTN, FFN)},
        **move_inside(inside, ("attn", "ffn")),
    }
