"""Plait: one inference engine for language models whose layers are of mixed kinds.

`import plait` is cheap: torch and the model code are loaded when `LLM` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError
from plait.request import SamplingParams

if TYPE_CHECKING:
    from plait.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "PlaitError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from plait.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
