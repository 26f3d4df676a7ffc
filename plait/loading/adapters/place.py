"""From `--lora NAME=PATH` to adapters in the slots of a loaded model, at startup and later."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.adapters.adapter_file import AdapterFile
from plait.checkpoint.adapters.gguf_adapter import open_gguf
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import WEIGHTS, open_peft
from plait.checkpoint.divided import list_names_elsewhere
from plait.checkpoint.find_files import ModelFiles
from plait.checkpoint.readers.gguf_metadata import is_own
from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.adapters import AdapterTable, no_adapters, parse_named
from plait.errors import BadFile, ConfigError, MissingTensor, UnsupportedFormat, list_some
from plait.families.common.inside import follow_body
from plait.families.common.resolved import Resolved
from plait.families.gguf.adapter_orders import find_orders
from plait.kernels.load import allocate_packed
from plait.ops.low_rank import AdapterLimits

_EXPERTS = re.compile(r"(^|[.])experts[.]|_exps([.]|$)")  # not those that all tokens share
log = logging.getLogger("plait")
MORE_SLOTS = 4  # of a model that takes adapters at run time, if --max-loras does not say how many


class AdaptableModel(Protocol):
    """A model's headers (`loading.open_model.Opened`)."""

    @property
    def files(self) -> ModelFiles: ...
    @property
    def metadata(self) -> Mapping[str, object] | None: ...
    @property
    def resolved(self) -> Resolved: ...
    @property
    def config(self) -> EngineConfig: ...


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """One of `--lora`, opened, before its model is built."""

    name: str
    path: str
    match: AdapterMatch


def open_adapter(path: Path, max_rank: int) -> AdapterFile:
    """A folder of PEFT's, or a GGUF file. Raises CheckpointError, one line each."""
    if path.is_dir():
        return open_peft(path, max_rank)
    if path.name == WEIGHTS:
        return open_peft(path.parent, max_rank)
    if not path.is_file():
        raise MissingTensor(f"{path}: there is no adapter; name a folder with {WEIGHTS}, or a .gguf file")
    return open_gguf(path, max_rank)


def match_adapter(opened: AdaptableModel, file: AdapterFile) -> AdapterMatch:
    """The adapter through the names of a model's files. Raises UnsupportedFormat for another model's."""
    resolved, metadata = opened.resolved, opened.metadata
    is_gguf = metadata is not None and not is_own(metadata)
    if file.naming == "hf":
        orders = find_orders(resolved, file.path) if is_gguf else {}
        names = follow_body(resolved.hf_names or resolved.names, file.pairs)
        return AdapterMatch(file, names, orders)
    if not is_gguf or metadata is None:
        raise UnsupportedFormat(
            f"{file.path}: a GGUF adapter is for a model in GGUF, and {opened.files.name} is none; use the "
            "adapter in PEFT's layout"
        )
    if file.architecture != metadata.get("general.architecture"):
        raise UnsupportedFormat(
            f"{file.path}: it is for the architecture {file.architecture!r}, and {opened.files.name} is "
            f"{metadata.get('general.architecture')!r}"
        )
    return AdapterMatch(file, resolved.names)


def place_adapters(opened: AdaptableModel, target: Target) -> Sequence[NamedAdapter]:
    """Open what `--lora` names, and have the model of `target` built with sites for it.

    Raises ConfigError where adapters are not possible, and CheckpointError for a bad one.
    """
    config = opened.config
    if not config.lora and config.lora_folder is None:
        return ()
    found = list[NamedAdapter]()
    for text in config.lora:
        name, path = parse_named(text)
        if name in (one.name for one in found):
            raise ConfigError(f"lora: the name {name!r} is there twice")
        file = open_adapter(Path(path), config.max_lora_rank)
        found.append(NamedAdapter(name, path, match_adapter(opened, file)))
    known, is_open = [one.match for one in found], config.lora_folder is not None
    elsewhere = tuple(list_names_elsewhere(target.cuts))
    target.adapters = AdapterSlots(_find_limits(config, target), known, elsewhere, is_open=is_open)
    return found


def _find_limits(config: EngineConfig, target: Target) -> AdapterLimits:
    """What the sites of a model have in common."""
    num_slots, rank = count_slots(config), config.max_lora_rank
    if target.platform == "cuda":
        return AdapterLimits(num_slots, rank, target.dtype, stacked_on=target.device)
    # As precise as keys and values: bfloat16 behind rounded weights, where float32 would only cost time.
    dtype = torch.float32 if target.kv_dtype in ("model", "float32") else torch.bfloat16
    return AdapterLimits(num_slots, rank, dtype, allocate=allocate_packed)


def _check_experts(file: AdapterFile, target: Target, slots: AdapterSlots) -> AdapterFile:
    """The same adapter. Raises UnsupportedFormat on a GPU for one of experts that have no site."""
    experts = [name for name, pair in file.pairs.items() if _EXPERTS.search(name) or pair.down.ndim > 2]
    if target.platform == "cuda" and experts and not slots.has_experts:
        raise UnsupportedFormat(
            f"{file.path}: it changes experts ({list_some(experts, 2)}), for which a GPU keeps memory only "
            "where an adapter of --lora changes them; name this one by --lora when the server is started"
        )
    return file


def count_slots(config: EngineConfig) -> int:
    """How many adapters are loaded at a time, at most. Raises ConfigError."""
    least = len(config.lora)
    most = config.max_loras or least + (MORE_SLOTS if config.lora_folder is not None else 0)
    if most < least:
        raise ConfigError(f"max_loras: {most} is less than the {least} adapters that --lora names")
    return most


class AdapterLoader:
    """Puts adapters into the slots of a rank's part of a model: first what `--lora` names, then others."""

    def __init__(self, opened: AdaptableModel, target: Target, named: Sequence[NamedAdapter]) -> None:
        self._opened, self._target, self._named = opened, target, list(named)

    def load(self, slot: int, path: str) -> str:
        """Put the adapter at a path into a slot; returns a hash of its numbers.

        One that `--lora` does not name comes only from inside of `lora_folder`. Raises CheckpointError and
        ConfigError; the slot is free then.
        """
        slots, opened = self._slots, self._opened
        first = next((one for one in self._named if one.path == path), None)
        if first is not None:
            self._named.remove(first)
            match = first.match
        else:
            config = opened.config
            file = open_adapter(find_inside(config.lora_folder, path), config.max_lora_rank)
            match = match_adapter(opened, _check_experts(file, self._target, slots))
        slots.load(slot, match)
        return match.file.digest

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self._slots.clear(slot)

    @property
    def _slots(self) -> AdapterSlots:
        if self._target.adapters is None:
            raise ConfigError("this model was loaded without adapters")
        return self._target.adapters


def load_adapters(opened: AdaptableModel, target: Target, named: Sequence[NamedAdapter]) -> AdapterTable:
    """Put the adapters into their slots, on all ranks. Raises CheckpointError.

    The table loads others later only from inside of `lora_folder`.
    """
    slots = target.adapters
    if slots is None:
        return no_adapters()
    loader = AdapterLoader(opened, target, named)

    def load(slot: int, path: str) -> str:
        digest = loader.load(slot, path)
        try:
            if target.ranks:
                target.ranks.load_adapter(slot, path, digest)
        except BadFile:
            clear(slot)
            raise
        return digest

    def clear(slot: int) -> None:
        loader.clear(slot)
        if target.ranks:
            target.ranks.clear_adapter(slot)

    table = AdapterTable(slots.limits.num_slots, load, clear)
    for one in named:
        table.load(one.name, one.path, ())
    if named:
        mib = slots.nbytes / (1 << 20)
        log.info("adapters: %s (%.1f MiB)", ", ".join(table.names), mib)
    return table


def find_inside(folder: str | None, path: str) -> Path:
    """A path of a request, inside of the folder. Raises ConfigError for any other."""
    if folder is None:
        raise ConfigError("adapters are not loaded at run time; start with --lora-folder")
    root = Path(folder).resolve()
    try:
        found = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise ConfigError("lora_path: it is no path") from None
    if not found.is_relative_to(root) or found == root:
        raise ConfigError("lora_path: it is not inside of --lora-folder; send a path relative to that folder")
    return found
