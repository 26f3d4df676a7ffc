"""SDAR, its mixture and LLaDA 2: texts are written by diffusion, one block of tokens after the other.

A block, here a *canvas*, is filled in several passes in any order. Its tokens see each other and all before
them. Layers are those of causal families, which these models are trained from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.registry import family
from plait.families.config.normalize import Config
from plait.families.ling_moe import ling_2_moe
from plait.families.llama import QWEN, qwen3
from plait.families.moe import qwen3_moe
from plait.spec.canvas import CanvasSpec
from plait.spec.model import AttentionSpec, BranchSpec, MlpSpec, ModelSpec, MoeSpec

LONGEST = 256  # tokens of a canvas
SDAR = {"head_dim": 128, "block_size": 4, "mask_token_id": 151_669}


@family("SDARForCausalLM", model_types=("sdar",), defaults={**QWEN, **SDAR})
def sdar(c: Config) -> tuple[ModelSpec, NameMap]:
    """SDAR (Cheng et al. 2025): Qwen3, with canvases of 4 tokens unless the config says otherwise."""
    return write_canvases(c, "sdar", qwen3)


@family(
    "SDARMoeForCausalLM",
    model_types=("sdar_moe",),
    defaults={
        **SDAR,
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "use_sliding_window": False,
    },
)
def sdar_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """SDAR 30B-A3B: the same of Qwen3-MoE."""
    return write_canvases(c, "sdar_moe", qwen3_moe)


@family(
    "LLaDA2MoeModelLM",
    model_types=("llada2_moe",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "first_k_dense_replace": 0,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
        "block_size": 32,
        "mask_token_id": 156_895,
    },
    honours=("use_qk_norm",),
)
def llada_2(c: Config) -> tuple[ModelSpec, NameMap]:
    """LLaDA 2 (Bie et al. 2025): Ling 2, with canvases of 32 tokens."""
    if c.get("expert_capacity") is not None:
        raise UnsupportedModel("expert_capacity: experts that a canvas chooses together are not implemented")
    return write_canvases(c, "llada2_moe", ling_2_moe)


def write_canvases(
    c: Config, name: str, build: Callable[[Config], tuple[ModelSpec, NameMap]]
) -> tuple[ModelSpec, NameMap]:
    """The layers of a causal family, for a model that fills canvases. Raises UnsupportedModel."""
    c.pop("is_causal", None)  # which says that it is not
    spec, names = build(c)
    size, mask = c["block_size"], c["mask_token_id"]
    if type(size) is not int or not 1 < size <= LONGEST or size & (size - 1):
        raise UnsupportedModel(f"block_size is {size!r:.40}; expected is a power of two from 2 to {LONGEST}")
    if type(mask) is not int or not 0 <= mask < spec.vocab_size:
        raise UnsupportedModel(
            f"mask_token_id is {mask!r:.40}; expected is a token from 0 to {spec.vocab_size - 1}"
        )
    ends = c.get("eos_token_id")
    if mask in (ends if isinstance(ends, list) else [ends]):
        raise UnsupportedModel(
            f"mask_token_id {mask} is an end of texts, too (eos_token_id), which none would have"
        )

    def turn(branch: BranchSpec) -> BranchSpec:
        match branch.mixer:
            case MlpSpec() | MoeSpec():
                return branch
            case AttentionSpec(window=None, slopes=None) as s if type(s) is AttentionSpec:
                return replace(branch, mixer=replace(s, canvas=size))
        raise UnsupportedModel(
            f"{name} with windows is not implemented; say so with --set sliding_window=null"
        )

    layers = tuple(tuple(turn(branch) for branch in layer) for layer in spec.layers)
    return replace(spec, family=name, layers=layers, canvas=CanvasSpec(size, mask)), names
