"""Chameleon as text: tokens of images may be read, and none is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.families.common.recipes import flat, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

L, ATTN = "model.layers.{i}", "layers.{i}.attn"
NEVER = -1e30  # the logit of a token that is not written
PIXELS = range(4, 8196)  # the tokens of images, where a file has no vocabulary by name


@family(
    "ChameleonForConditionalGeneration",
    model_types=("chameleon",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "swin_norm": False, "vocabulary_map": None},
)
def chameleon(c: Config) -> tuple[ModelSpec, NameMap]:
    """Chameleon 7B and 30B: layer norms of each head of q and k. `swin_norm`: norms are behind the mixers."""
    each = norm(c)
    attn = gqa(c, qk_norm=NormSpec(1e-5, "layer"), qk_norm_over="each")
    layer = (BranchSpec("attn", attn, each), BranchSpec("ffn", mlp(c), each))
    if c["swin_norm"]:
        layer = (BranchSpec("attn", attn, None, each), BranchSpec("ffn", mlp(c), None, each))
    own: Rules = {
        **{
            f"{ATTN}.{x}_norm.{end}": flat(f"{L}.self_attn.{x}_norm.{end}")
            for x in "qk"
            for end in ("weight", "bias")
        },
        "layers.{i}.attn.post_norm": f"{L}.input_layernorm",
        "layers.{i}.ffn.post_norm": f"{L}.post_attention_layernorm",
        "head.bias": silence(_images(c), c["vocab_size"]),
    }
    spec = model(c, "chameleon", [layer] * c["num_hidden_layers"])
    return spec, NameMap(own, transformer(), ignored=unused_patterns(c, r"^model\.vqmodel\."))


def _images(c: Config) -> Sequence[int]:
    """The tokens of images, by their names."""
    if c.get("gguf_architecture"):
        return PIXELS
    return [number for name, number in (c["vocabulary_map"] or {}).items() if name.startswith("IMGIMG")]


def silence(tokens: Sequence[int], size: int) -> Derived:
    """Biases of a table of logits, by which some tokens are never written."""

    def biases(**_: str) -> torch.Tensor:
        found = torch.zeros(size)
        found[[number for number in tokens if 0 <= number < size]] = NEVER
        return found

    return Derived(biases, ())


def _gguf_names(c: Config) -> Rules:
    norms = {
        f"{ATTN}.{x}_norm.{end}": flat(f"blk.{{i}}.attn_{x}_norm.{end}")
        for x in "qk"
        for end in ("weight", "bias")
    }
    return {
        **norms,
        "layers.{i}.attn.post_norm": "blk.{i}.attn_norm",
        "layers.{i}.ffn.post_norm": "blk.{i}.ffn_norm",
        "head.bias": silence(_images(c), c["vocab_size"]),
    }


@gguf_arch(
    "chameleon",
    "ChameleonForConditionalGeneration",
    constants={"rope_interleave": True},
    names=_gguf_names,
    is_written=False,
)
def _chameleon_in_gguf(m: Metadata) -> None:
    m.put("swin_norm", bool(m.values.get("swin_norm")), f"{FILE} {m.prefix}swin_norm")
