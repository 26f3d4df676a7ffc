"""Texts of MiniCPM-V and MiniCPM-o: by version MiniCPM, Llama, Qwen2 or Qwen3, in files below `llm.`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.registry import family
from plait.families.config.normalize import Config
from plait.families.llama import QWEN, dense, qwen3
from plait.families.llama_layouts import MINICPM, minicpm
from plait.spec.model import ModelSpec

FIRST_SIZES = {"hidden_size": 2304, "query_num": 64}  # of 2.0, which has no version in its config


def _minicpm(c: Config) -> tuple[ModelSpec, NameMap]:
    for key in MINICPM:
        c.setdefault(key, 1)
    c.setdefault("tie_word_embeddings", True)
    return minicpm(c)


def _dense(c: Config) -> tuple[ModelSpec, NameMap]:
    """Llama or Qwen2: biases are where the checkpoint has them."""
    return dense(c, "minicpmv")


TEXTS: Mapping[str, Callable[[Config], tuple[ModelSpec, NameMap]]] = {
    "2.0": _minicpm,
    "2.5": _dense,
    "2.6": _dense,
    "4.0": _dense,
    "4.5": qwen3,
}


@family(
    *("MiniCPMV", "MiniCPMO"),
    model_types=("minicpmv", "minicpmo"),
    defaults={**QWEN, "sparse_config": None},
    honours=("sliding_window", *MINICPM),
)
def minicpmv(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiniCPM-V 2.0 to 4.5 and MiniCPM-o (text). Raises UnsupportedModel for another version."""
    is_first = all(c.get(key) == value for key, value in FIRST_SIZES.items())
    version = str(c.get("version") or (2.0 if is_first else 2.5))
    version = version if "." in version else f"{version}.0"
    if version not in TEXTS:
        raise UnsupportedModel(
            f"version {c['version']} of {c.get('model_type')} is not known; known: {', '.join(TEXTS)}"
        )
    return TEXTS[version](c)
