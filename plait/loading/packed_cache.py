"""The packed-weight cache: which packed weights belong to a model and its options, and when to write."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from plait.cache_folder import make_folder
from plait.checkpoint.identity import identify_file
from plait.checkpoint.packed_cache.cache import Shelf
from plait.checkpoint.packed_cache.file_format import (
    SUFFIX,
    as_stem,
    default_folder,
    is_folder,
    list_packed,
    read_key,
)
from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.memory_plan import gib
from plait.kernels.load import describe_target
from plait.loading.identity.source_code import hash_code
from plait.loading.open_model import Opened
from plait.ops.registry import Binding

log = logging.getLogger("plait")
RESERVE_NBYTES = 1 << 30  # of the disk, which stay free
# Options that change nothing of what is packed: all others are in the key.
APART = frozenset({
    "vocab", "chat_template", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting",
    "block_size", "memory_limit", "gpu_memory", "pdl", "prefix_cache", "snapshot_interval", "swap_memory",
    "cache_disk", "cache_disk_limit", "cache_disk_bandwidth",
    "max_step_ms", "speculate", "num_draft_tokens", "threads", "deterministic", "kv_dtype", "state_dtype",
    "canvas_threshold", "canvas_edit_threshold", "canvas_edit_passes",
    "cache_dir", "packed_cache", "lora", "lora_folder", "max_loras", "max_lora_rank",
    "offline", "probe", "prefill", "no_fuse", "plugins",
})  # fmt: skip
ROOMS = ("spec", "checkpoint", "families", "kernels", "model", "ops", "quant")  # that decide what is packed


def folder_of(config: EngineConfig) -> Path | None:
    """Where packed weights are looked for; None: nowhere."""
    if config.packed_cache == "off":
        return None
    named = config.packed_cache != "auto"
    return Path(config.packed_cache) if named else default_folder(config.cache_dir)


def shelf_of(opened: Opened, target: Target, part: str = "") -> Shelf | None:
    """A model's entry of the packed-weight cache; None where nothing is packed or there is no folder.

    part: of a model that is packed apart, as a head for drafts is. Raises BadFile if weights were replaced
    since they were opened.
    """
    folder = folder_of(opened.config)
    if folder is None or target.executor is None:
        return None
    if opened.config.packed_cache == "auto" and opened.config.startup_image != "off":
        with suppress(OSError):  # a folder that cannot be made is none
            make_folder(folder)
    if not is_folder(folder):
        if opened.config.packed_cache != "auto":
            log.warning("--packed-cache: %s is no folder that can be read; weights are packed anew", folder)
        return None
    key = key_of(opened, target, part)
    opened.files.check_unchanged()  # the key is of the files that have the names now
    name = f"{as_stem(opened.files.name)}-{_digest(json.dumps(key).encode())[:16]}{SUFFIX}"
    return Shelf(folder / name, str(opened.files.weights[0].resolve()), key)


def key_of(opened: Opened, target: Target, part: str = "") -> dict[str, object]:
    """All that decides how weights are packed, as plain values."""
    files, resolved, config = opened.files, opened.resolved, opened.config
    texts = [*files.side_files.values(), *([files.config] if files.config else [])]
    made_for = describe_target(isa=config.isa)
    key = {
        "weights": [identify_file(path) for path in files.weights],
        "texts": [identify_file(path) for path in sorted(texts)],
        "model": _digest(repr((resolved.spec, sorted(resolved.config.items()))).encode()),
        "options": {name: value for name, value in asdict(config).items() if name not in APART},
        "computes": [str(target.dtype), target.activations],
        "made by": [hash_code(ROOMS), torch.__version__, made_for.room_name if made_for else ""],
        "plugins": [plugin.digest for plugin in opened.plugins],
    }
    if part:
        key["part"] = f"{part} {target.quantize}"
    plain: dict[str, object] = json.loads(json.dumps(key))
    return plain


def list_shelves(target: Target) -> list[tuple[Shelf, Target]]:
    """What was packed, and what for: a model's weights, and those of its head for drafts."""
    targets = [target, target.drafts] if target.drafts else [target]
    return [(one.shelf, one) for one in targets if one.shelf is not None]


def bind_packed(target: Target) -> Binding:
    """Whether packed weights were mapped, as a row of `plait info --ops`."""
    shelf = target.shelf
    if shelf is not None and shelf.is_full:
        log.info(
            "weights: %d packed linear layers (%s) from %s", shelf.num_found, gib(shelf.nbytes), shelf.path
        )
        return Binding("weights", "mapped", str(shelf.path), ())
    why = "`plait warmup` has kept none for this model and these options"
    return Binding("weights", "packed while loading", "", (("mapped", why),))


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def keep(shelf: Shelf, opened: Opened, target: Target, limit: int) -> str:
    """Write what was packed, if folder and disk have space for it. Returns the outcome as a sentence.

    limit: bytes that the folder may hold in all.
    """
    folder, needed = shelf.path.parent, shelf.count_needed()
    if shelf.is_full:
        return f"packed weights: {gib(shelf.nbytes)} are kept in {shelf.path}"
    if not needed:
        return "packed weights: none are kept: this model has no linear layer that is packed"
    if not is_current(shelf, opened, target):
        return "packed weights: none are kept: the model's files, or Plait's own, changed meanwhile"
    try:
        _drop_outdated(shelf)
        if why := _no_room(shelf, needed, limit):
            return f"packed weights: none are kept: {why}"
        written = shelf.write()
    except OSError as error:
        return f"packed weights: none are kept: {folder} cannot be written ({error.strerror or error})"
    return f"packed weights: {gib(written)} written to {shelf.path}"


def is_current(shelf: Shelf, opened: Opened, target: Target) -> bool:
    """Whether the model's files are still those that were there when it was loaded. Raises BadFile."""
    part = str(shelf.key.get("part", "")).partition(" ")[0]
    return key_of(opened, target, part) == shelf.key


def _no_room(shelf: Shelf, needed: int, limit: int) -> str | None:
    """Why there is no space for so many more bytes; None if there is."""
    folder = shelf.path.parent
    held = sum(item.nbytes for item in list_packed(folder) if item.path != shelf.path)
    if held + needed > limit:
        return (
            f"{gib(needed)} and the {gib(held)} already in {folder} are more than --packed-limit, "
            f"{gib(limit)}; `plait warmup --clear` removes what is there"
        )
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE_NBYTES:
        return (
            f"they take {gib(needed)}, {gib(RESERVE_NBYTES)} must stay free, and the disk of {folder} has "
            f"{gib(free)}; --packed-cache takes another folder"
        )
    return None


def _drop_outdated(shelf: Shelf) -> None:
    """Remove entries that no later run can use: of older versions of these files, or by other code."""
    for item in list_packed(shelf.path.parent):
        found = read_key(item.path)
        if found is None:
            continue
        source, key = found
        is_same = key.get("weights") == shelf.key["weights"]
        is_ours = _versions(key) == _versions(shelf.key)
        if (is_same and not is_ours) or (source == shelf.source and not is_same):
            log.info("packed weights that no run can use any more are removed: %s", item.path)
            item.path.unlink(missing_ok=True)


def _versions(key: Mapping[str, Any]) -> tuple[str, ...]:
    """The versions in a key, without the processor: machines of several kinds may share a folder."""
    ours, torch_version, room = key.get("made by", ("", "", ""))
    return ours, torch_version, room.rpartition("-")[2]
