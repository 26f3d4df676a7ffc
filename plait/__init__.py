"""Plait: one inference engine for language models with layers of mixed kinds.

`import plait` is cheap, because torch and the model code are loaded when `LLM` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError
from plait.request import SamplingParams
from plait.version import __version__

if TYPE_CHECKING:
    from plait.llm.llm import LLM

__all__ = ["LLM", "PlaitError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from plait.llm.llm import LLM

        return LLM
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
