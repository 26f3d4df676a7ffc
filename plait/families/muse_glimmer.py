"""Muse Glimmer (text): gated attention in windows, whole layers without positions, norms around all."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import TEXT_PREFIXES, at, plus_one, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import Metadata, gguf_arch, windows
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

IMAGES = (r"^(model\.)?(vision_tower|vision_adapter|vision_projection)\.",)
PERIOD = 4  # the last layer, and every fourth before it, is whole and has no positions
NORMS = {
    "layers.{i}.attn.norm": "input_layernorm",
    "layers.{i}.attn.post_norm": "post_attention_layernorm",
    "layers.{i}.ffn.norm": "pre_feedforward_layernorm",
    "layers.{i}.ffn.post_norm": "post_feedforward_layernorm",
}


@family(
    "MuseGlimmerForConditionalGeneration",
    model_types=("muse_glimmer", "muse_glimmer_text"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87,
    },
    honours=("sliding_window", "final_logit_softcapping", "layer_rope_theta"),
)
def muse_glimmer(c: Config) -> tuple[ModelSpec, NameMap]:
    """Norms of heads have no weight; queries are multiplied by a number. GGUF has it as a weight."""
    each, behind = norm(c), NormSpec(c["post_norm_eps"])
    kinds, whole = find_kinds(c)
    bare, factor = NormSpec(c["norm_eps"], weight=False), c["qk_scale_factor"]
    mixer = {kind: gqa(c, kind, qk_norm=bare if factor else each, gate=True) for kind in (FULL, SLIDING)}
    if factor:
        mixer = {kind: replace(s, scale=s.scale * factor) for kind, s in mixer.items()}
    turns = find_turned(c, [not one for one in whole])
    ffn = BranchSpec("ffn", mlp(c), each, behind)
    layers = [
        (BranchSpec("attn", mixer[kind] if turned else replace(mixer[kind], rope=None), each, behind), ffn)
        for kind, turned in zip(kinds, turns, strict=True)
    ]
    scales = {"logit_scale": float(c["output_multiplier"]), "logit_softcap": c["final_logit_softcapping"]}
    spec = model(c, "muse_glimmer", layers, embed_norm=bare, **scales)
    return spec, NameMap(at(TEXT_PREFIXES, _names), ignored=unused_patterns(c, *IMAGES))


def find_kinds(c: Config) -> tuple[list[str], list[bool]]:
    """The kind of each layer, and which ones are whole where no config says it."""
    count = len(c["layer_types"])
    whole = [(count - 1 - i) % PERIOD == 0 for i in range(count)]
    kinds = c["layer_types"] if c.get("layer_words") else [FULL if one else SLIDING for one in whole]
    return kinds, whole


def find_turned(c: Config, usual: list[bool]) -> list[bool]:
    """Whether each layer has positions: a base of 0 says that it has none."""
    thetas = c.get("layer_rope_theta")
    if thetas is None:
        return usual
    base = c["rope_parameters"][FULL]["rope_theta"]
    if len(thetas) != len(usual) or set(thetas) - {0, base}:
        raise UnsupportedModel(
            f"layer_rope_theta {thetas!r:.120} is not implemented; known: 0 or {base:g} for each of "
            f"{len(usual)} layers"
        )
    return [theta != 0 for theta in thetas]


def _names(prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    norms = {f"{ours}.weight": plus_one(f"{layer}.{theirs}.weight") for ours, theirs in NORMS.items()}
    return {**norms, **transformer(prefix)}


@gguf_arch(
    "muse-glimmer",
    "MuseGlimmerForConditionalGeneration",
    constants={"rope_interleave": True, "qk_scale_factor": None},
    names=lambda c: {"layers.{i}.attn.gate": "blk.{i}.attn_gate"},
    is_written=False,
)
def _muse_in_gguf(m: Metadata) -> None:
    windows(m, PERIOD)
    m.take("output_multiplier", "logit_scale")
    m.config.pop("logits_scaling", None)
    if kinds := m.config.get("layer_types"):
        base = m.config.setdefault("rope_theta", 1e4)
        m.put("layer_rope_theta", [0 if kind == FULL else base for kind in kinds], "layers with windows turn")
