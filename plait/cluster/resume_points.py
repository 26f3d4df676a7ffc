"""What a replica can resume, as reports of bounded size: gateways hear of a reply's points before its end.

A resume point is the hash of the whole blocks before it (`plait.state.blocks`): 16 bytes, and no text. Paged
state can be resumed behind every block, recurrent state only where a snapshot is. A snapshot inside a block
counts for the blocks before it, so a hybrid's reports say up to 15 tokens less than there is, and never more.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from plait.state.prefix_tree import PrefixChanges

MAX_CHANGES = 4096  # hashes in one report: 64 KiB


class PointSource(Protocol):
    """What an engine can resume. Everything is safe from any thread."""

    @property
    def has_changed(self) -> bool: ...
    def begin_anew(self) -> None: ...
    def report(self, waiting_tokens: int, open_replies: int) -> list[ReplicaReport]: ...


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One message of a replica. `number` counts its messages; a gap means that changes were lost.

    `begins`: forget every point that was reported before, because this message and those behind it have all
    of them. `waiting_tokens`: of prompts that are not computed yet. `open_replies`: choices that run or wait.
    """

    number: int
    waiting_tokens: int
    open_replies: int
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    begins: bool = False


@dataclass(slots=True)
class ResumePoints:
    """The points of one replica, and what has changed since its last report.

    A hash may be added several times (a group's block and a snapshot, two snapshots in one block): it is a
    point until it was removed as often. Safe from several threads: changes come from the engine's supervisor.
    """

    _counts: Counter[bytes] = field(default_factory=Counter)
    _added: dict[bytes, None] = field(default_factory=dict)  # in order, the oldest first
    _removed: dict[bytes, None] = field(default_factory=dict)
    _number: int = 0
    _is_new: bool = True  # no report was made, or the next one is to have everything
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def has_changed(self) -> bool:
        """Whether there is more to report than loads."""
        with self._lock:
            return bool(self._is_new or self._added or self._removed)

    def add(self, point: bytes) -> None:
        """A prefix can be resumed from now on."""
        with self._lock:
            self._counts[point] += 1
            if self._counts[point] == 1 and self._removed.pop(point, self) is self:
                self._added[point] = None

    def remove(self, point: bytes) -> None:
        """A prefix cannot be resumed any more: its block or snapshot was evicted. It must have been added."""
        with self._lock:
            assert self._counts[point] > 0, "a resume point is removed that was never added"
            self._counts[point] -= 1
            if not self._counts[point]:
                del self._counts[point]
                if self._added.pop(point, self) is self:
                    self._removed[point] = None

    def apply(self, changes: PrefixChanges) -> None:
        """Take in what an engine reports of its cache: for `EngineProcess.follow_prefixes`."""
        with self._lock:
            if changes.begins:
                for changed in (self._counts, self._added, self._removed):
                    changed.clear()
                self._is_new = True
            for point in changes.removed:
                self.remove(point)
            for point in changes.added:
                self.add(point)

    def begin_anew(self) -> None:
        """The next reports have every point: a gateway needs that after a gap."""
        with self._lock:
            self._is_new = True

    def report(self, waiting_tokens: int, open_replies: int) -> list[ReplicaReport]:
        """What has changed since the last call, as one message; or everything, in as many as that takes.

        Everything is reported first, when `begin_anew` was called, and when more than MAX_CHANGES changed.
        """
        with self._lock:
            is_new = self._is_new or len(self._added) + len(self._removed) > MAX_CHANGES
            added = tuple(self._counts if is_new else self._added)
            removed = () if is_new else tuple(self._removed)
            self._added.clear()
            self._removed.clear()
            self._is_new = False
        reports = []
        for start in range(0, max(len(added), 1), MAX_CHANGES):
            self._number += 1
            part, begins = added[start : start + MAX_CHANGES], is_new and start == 0
            reports.append(ReplicaReport(self._number, waiting_tokens, open_replies, part, removed, begins))
        return reports
