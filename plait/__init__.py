"""Plait: one inference engine for language models with layers of mixed kinds.

`import plait` is cheap, because names are imported when they are first used. An engine process watches its
parent before it imports a library, and whatever is imported here comes even earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError
from plait.version import __version__

if TYPE_CHECKING:
    from plait.llm.beam_search import BeamSearchParams
    from plait.llm.llm import LLM
    from plait.request import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "PlaitError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from plait.llm.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from plait.llm.beam_search import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from plait.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
