"""DiffusionGemma: Gemma 4's experts, which write a text canvas by canvas out of random tokens.

What is known of a text goes through the layers as in Gemma 4 (the "encoder"). Places of a canvas go through
the same layers (the "decoder"), but see each other, and each layer scales them by a number of their own.
"""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import GEMMA_WORDS, HfConfig
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, require
from plait.families.config.normalize import Config
from plait.families.gemma4 import DEFAULTS, gemma4_layers, layer_names
from plait.spec.canvas import NoisyCanvasSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

LONGEST, MOST_PASSES = 1024, 1024
COOL, LEAST = 1e-3, 1e-9  # the least temperature at the beginning, and entropy
PREFIX = "model.decoder."
ENCODER = "model.encoder.language_model.layers.{i}.layer_scalar"
# Which keys say how canvases are written; they are in generation_config.json.
SCHEDULE: dict[str, object] = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"entropy_bound": 0.1},
}


@family(
    "DiffusionGemmaForBlockDiffusion",
    model_types=("diffusion_gemma", "diffusion_gemma_text"),
    defaults={
        **DEFAULTS,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "canvas_length": 256,
        **SCHEDULE,
    },
    honours=("sliding_window", "per_layer_config", "final_logit_softcapping", "use_bidirectional_attention"),
    hf=HfConfig(words=GEMMA_WORDS),
)
def diffusion_gemma(c: Config) -> tuple[ModelSpec, NameMap]:
    """DiffusionGemma 26B-A4B: canvases of 256 tokens. Its images are not read."""
    require(c, "DiffusionGemma", tie_word_embeddings=(True,), enable_moe_block=(True,))
    spec = gemma4_layers(c, "diffusion_gemma")

    def turn(branch: BranchSpec) -> BranchSpec:
        own = branch.mixer
        seen = replace(own, open_canvas=True) if isinstance(own, AttentionSpec) else own
        return replace(branch, mixer=seen, factor="canvas" if branch.factor else False)

    layers = tuple(tuple(map(turn, layer)) for layer in spec.layers)
    names = {
        **layer_names(c, PREFIX),
        "layers.{i}.{branch}.factor": ENCODER,
        "layers.{i}.{branch}.canvas_factor": f"{PREFIX}layers.{{i}}.layer_scalar",
        "canvas.norm": f"{PREFIX}self_conditioning.pre_norm",
        "canvas.mlp.{x}": f"{PREFIX}self_conditioning.{{x}}_proj",
    }
    unused = unused_patterns(c, r"^model\.encoder\.")  # its layers are the decoder's
    spec = replace(spec, layers=layers, canvas=read_canvas(c), canvas_mlp=mlp(c))
    return spec, NameMap(names, transformer(PREFIX), ignored=unused)


def read_canvas(c: Config) -> NoisyCanvasSpec:
    """How canvases are written. Raises UnsupportedModel."""
    sampler = c["sampler_config"]
    if not isinstance(sampler, dict) or sampler.get("_cls_name") not in (None, "EntropyBoundSamplerConfig"):
        raise UnsupportedModel(f"sampler_config is {sampler!r:.80}; expected is an entropy_bound")
    hottest = _number(c, "t_max", c["t_max"], least=COOL, most=1.0)
    return NoisyCanvasSpec(
        size=_count(c, "canvas_length", LONGEST),
        most_passes=_count(c, "max_denoising_steps", MOST_PASSES),
        coolest=_number(c, "t_min", c["t_min"], least=0.0, most=hottest),
        hottest=hottest,
        entropy_bound=_number(c, "entropy_bound", sampler.get("entropy_bound")),
        stable_passes=_count(c, "stability_threshold", MOST_PASSES, least=0),
        confidence=_number(c, "confidence_threshold", c["confidence_threshold"]),
    )


def _count(c: Config, key: str, most: int, least: int = 1) -> int:
    value = c[key]
    if type(value) is not int or not least <= value <= most:
        raise UnsupportedModel(f"{key} is {value!r:.40}; expected is a number from {least} to {most}")
    return value


def _number(c: Config, key: str, value: object, least: float = LEAST, most: float = 1e3) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UnsupportedModel(f"{key} is {value!r:.40}; expected is a number from {least:g} to {most:g}")
    return float(value)
