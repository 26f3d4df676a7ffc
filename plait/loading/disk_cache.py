"""Opens the disk cache of an engine: its folder, its fingerprint, and how its copies are laid out."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from plait.cache_folder import make_folder
from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.fingerprint import Fingerprint
from plait.errors import ConfigError
from plait.kernels.load import why_refused
from plait.memory import PagedState, State
from plait.schedule.disk_prefixes import DiskPrefixes
from plait.state.disk.cache import DiskCache
from plait.state.host_store import HostStore

NO_DISK = "cache_disk: state on a GPU is not kept on the disk; leave it out, or use --cpu"
log = logging.getLogger("plait")


def open_disk_cache(
    config: EngineConfig,
    engine: Engine,
    store: HostStore | None,
    states: Mapping[str, State],
    fingerprint: Fingerprint,
) -> DiskCache | None:
    """The disk cache that `config` requests, in use by `engine` and its `store`; None: it requests none.

    `fingerprint`: of this model here. Its arithmetic covers the processor, what the model computes in, and
    the code of the kernels, so no file of an older version is ever read.
    Raises ConfigError for a file, a folder that others may write, for a GPU, and for a model that is not
    causal.
    """
    if config.cache_disk is None:
        return None
    if store is None:
        raise ConfigError(NO_DISK)
    if not engine.scheduler.limits.causal:
        raise ConfigError(
            "cache_disk: this model computes a whole sequence in each step, so it has no prefixes"
        )
    folder = Path(config.cache_disk).expanduser().absolute()
    name = _combine(fingerprint.arithmetic, states, store.block_size)
    try:
        make_folder(folder.parent)
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise ConfigError(f"cache_disk: {folder} is a file; name a folder") from None
    except OSError as error:
        log.warning("disk cache: %s cannot be made (%s); nothing is kept", folder, error.strerror)
    if refused := why_refused(folder / name):
        raise ConfigError(f"cache_disk: {refused}; state of requests is not kept where others may change it")
    limit, bandwidth = config.cache_disk_limit, config.cache_disk_bandwidth
    disk = DiskCache(folder, name, store.layout, limit, bandwidth=bandwidth)
    scheduler = engine.scheduler
    store.disk, scheduler.memory.disk = disk, DiskPrefixes(disk, scheduler.costs, scheduler.clock)
    log.info("prefix cache: kept in %s", folder / name)
    return disk


def _combine(arithmetic: str, states: Mapping[str, State], block_size: int) -> str:
    """32 hexadecimal digits, of all that decides what the bytes of a block or a slot mean."""
    layout = [
        (name, isinstance(state, PagedState) and state.window, [*state.tensors.items()])
        for name, state in states.items()
    ]
    known = repr((arithmetic, block_size, layout))
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
