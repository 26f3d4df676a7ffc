"""Run a cell of `plait verify` in engines of their own processes, which get SIGKILL in mid-reply."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from plait.cache_folder import cache_base, make_folder
from plait.config import EngineConfig
from plait.errors import EngineError
from plait.request import Event
from plait.verify.matrix import Cell
from plait.verify.prompts import VerifyRequest
from plait.verify.results import Ran, VerifyReply
from plait.worker.client import EngineProcess

KILLS = 1  # of each wave, in the middle of its tokens
WAIT_S = 300.0  # for a wave: processes start again in it
QUIET_S = 0.5  # without another file all is written
MEMORY = 256 << 20  # bytes for the state of sequences; the models are small


@dataclass(slots=True)
class KilledWave:
    """The replies of a wave, and the process that is killed while they come. `num_left`: open requests."""

    process: EngineProcess
    kill_at: list[int]
    num_left: int
    num_tokens: int = 0
    num_kills: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, reply: VerifyReply, event: Event) -> None:
        """Called on the supervisor's thread, one event after the other."""
        reply.on_event(event)
        self.num_tokens += len(event.token_ids)
        if self.kill_at and self.num_tokens >= self.kill_at[0]:
            self.num_kills += kill(self.process)
            self.kill_at.pop(0)
        self.num_left -= event.finish_reason is not None
        if not self.num_left:
            self.done.set()


def run_killed(
    cell: Cell, model: str, config: EngineConfig, waves: Sequence[Sequence[VerifyRequest]], folder: Path
) -> Ran:
    """Each wave in a process that is killed and replaced; behind it that one is killed, too.

    The first process loads the model and keeps a startup image, as a server does; the others start from that
    where there is one. With a disk cache the next wave begins with what the killed ones have written. Raises
    what loading does, and EngineError if a wave does not end. folder: for all of these files.
    """
    states = folder / "states"
    config = replace(
        config,
        cache_disk=str(states) if cell.disk else None,
        memory_limit=MEMORY,
        cache_dir=str(_make_cache(folder / "cache", config.cache_dir)),
        startup_image="auto",
        packed_cache="auto",
    )
    replies: dict[tuple[int, str], VerifyReply] = {}
    counts: Counter[str] = Counter()
    for number, wave in enumerate(waves):
        process = EngineProcess(model, config)
        try:
            process.source(_silent)
            process.ready(_silent)
            counts["kills"] += _run_wave(process, number, wave, replies)
            counts["disk_reads"] += process.stats().get("num_disk_read", 0)
            if cell.disk:
                _wait_written(states)
            kill(process)
        finally:
            process.close(drain=False)
    counts["hit_tokens"] = sum(reply.num_cached for reply in replies.values())
    return Ran(replies, dict(counts))


def _run_wave(
    process: EngineProcess,
    number: int,
    wave: Sequence[VerifyRequest],
    replies: dict[tuple[int, str], VerifyReply],
) -> int:
    """Run a wave to its end; how often its process was killed."""
    total = sum(asked.request.params.max_tokens or 0 for asked in wave)
    at = [total * (n + 1) // (KILLS + 1) for n in range(KILLS)]
    running = KilledWave(process, at, len(wave))
    for asked in wave:
        reply = replies[number, asked.name] = VerifyReply()
        request = replace(asked.request, id=f"{number}: {asked.name}")
        process.submit(request, partial(running.on_event, reply))
    if not running.done.wait(WAIT_S):
        raise EngineError(f"{running.num_left} requests have not ended within {WAIT_S:g} s after a kill")
    return running.num_kills


def kill(process: EngineProcess) -> bool:
    """End the engine's process as `kill -9` does. False: there is none."""
    if (pid := process.pid) is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _make_cache(folder: Path, usual: str | None) -> Path:
    """A folder for startup images and packed weights alone, with the compiled kernels of the usual one."""
    make_folder(folder)
    if base := cache_base(usual):
        make_folder(base / "kernels")
        (folder / "kernels").symlink_to(base.absolute() / "kernels", target_is_directory=True)
    return folder


def _wait_written(folder: Path) -> None:
    """Writing is behind the replies: wait until no file comes any more."""
    seen = -1
    while (now := sum(1 for _ in folder.rglob("*.state"))) != seen:
        seen = now
        time.sleep(QUIET_S)


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
