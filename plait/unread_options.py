"""Options that a user has set and that have no effect on this model here: one line of the log for each cause.

What contradicts another option is refused where both are known. A table of options serves several models and
machines, though, and what only some of them read is no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from plait.config import EngineConfig
from plait.memory import PagedState, SlotState, State

KERNELS = ("precise", "prefill", "isa")  # what kernels of a CPU compute
CANVASES = ("canvas_threshold", "canvas_edit_threshold", "canvas_edit_passes")
REPLIES = ("speculate", "open_objects", "json_space")
Row = tuple[bool, tuple[str, ...], str]  # whether it holds, which options are not read then, why


def list_unread(
    config: EngineConfig, states: Mapping[str, State], *, causal: bool, is_on_gpu: bool, has_canvas: bool
) -> list[str]:
    """What an engine does not read, for a model with these states."""
    kinds = {type(state) for state in states.values()}
    rows: tuple[Row, ...] = (
        (is_on_gpu, (*KERNELS, "threads", "packed_cache"), "for CPUs alone"),
        (not is_on_gpu, ("gpu_memory", "pdl"), "the model is on a CPU"),
        (config.memory_limit is not None, ("gpu_memory",), "memory_limit says how much there is"),
        (config.ops == "reference", (*KERNELS, "no_fuse", "packed_cache", "pdl"), "ops is reference"),
        (config.num_ranks > 1, ("packed_cache",), "weights of several ranks are packed anew"),
        (config.speculate == "off", ("num_draft_tokens",), "speculate is off"),
        (not has_canvas, CANVASES, "this model fills no masks"),
        (config.canvas_edit_threshold is None, ("canvas_edit_passes",), "there is no canvas_edit_threshold"),
        (not config.lora and config.lora_folder is None, ("max_lora_rank",), "there are no adapters"),
        (PagedState not in kinds, ("kv_dtype",), "this model has no keys and values"),
        (SlotState not in kinds, ("snapshot_interval",), "this model has no recurrent state"),
        (not (config.prefix_cache and causal), ("snapshot_interval",), "nothing is kept for other requests"),
    )
    return _describe(_find_changes(config), rows)


def list_unread_text(
    config: EngineConfig, tools: str | None, reasoning: str | None, *, generates: bool, has_template: bool
) -> list[str]:
    """What the text side of a model does not read. `tools`, `reasoning`: formats that options name."""
    parsers = {"tool_call_parser": tools, "reasoning_parser": reasoning}
    given = _find_changes(config) | {name for name, value in parsers.items() if value not in (None, "none")}
    rows: tuple[Row, ...] = (
        (not generates, (*REPLIES, *parsers), "this model writes no replies"),
        (not has_template, (*parsers,), "this model has no chat template"),
    )
    return _describe(given, rows)


def _find_changes(config: EngineConfig) -> set[str]:
    """The options that are not at their defaults. Off has the effect that it promises everywhere."""
    plain = EngineConfig()
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name for name, value in values.items() if value not in (getattr(plain, name), "off")}


def _describe(given: set[str], rows: Iterable[Row]) -> list[str]:
    found: dict[str, list[str]] = {}
    for holds, names, why in rows:
        unread = [name for name in names if name in given] if holds else []
        if unread:
            found.setdefault(why, []).extend(unread)
            given = given - {*unread}
    return [f"{', '.join(names)}: without effect: {why}" for why, names in found.items()]
