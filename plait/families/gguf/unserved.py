"""Architectures of llama.cpp that no family runs, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from plait.families.common.refused import AUDIO, DIFFUSION, ENCODER, ENCODER_DECODER, IMAGE

_REASONS: Mapping[str, tuple[str, ...]] = {
    ENCODER_DECODER: ("t5",),
    ENCODER: (
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
        *("eurobert", "t5encoder"),
    ),
    DIFFUSION: ("dream", "llada", "llada-moe", "rnd1"),
    AUDIO: ("pockettts", "qwen3tts", "wavtokenizer-dec"),
    IMAGE: ("clip",),
    "a router chooses among adapters for each token, which is not implemented": ("graniteswitch",),
    "it is a file of bitnet.cpp, which packs weights in a type of its own (I2_S)": (
        "bitnet-b1.58",
        "bitnet-25",
    ),
    "it is written by no converter: llama.cpp has the name alone": ("gptj",),
}
UNSERVED: Mapping[str, str] = MappingProxyType(
    {arch: why for why, names in _REASONS.items() for arch in names}
)
