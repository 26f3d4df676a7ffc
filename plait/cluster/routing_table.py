"""Which replica gets a request: where it costs least, by what replicas report and what was sent since.

Each gateway has a table. Replicas report what they have to do and can resume with a reply's first token,
before its end, and once a second; what this gateway has sent there since is added. A replica that has
not reported for STALE_S gets requests only when that is true of all. Then a request goes to the home of its
beginning, by a hash that every gateway computes alike: what one gateway has sent misleads it as soon as
there are two.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from plait.cluster.costs import count_missing, order_by_home, order_home, seed_name, weigh_load
from plait.cluster.resume_points import ReplicaReport

STALE_S = 30.0
MAX_POINTS = 1 << 16  # resume points that are kept of one replica; the oldest go first
# A beginning that this gateway sees for the first time may be no other's: little may wait for it.
NEW_HOME_TOKENS = 512
# One that comes more often is worth keeping in many replicas, and its readers are enough for that.
RARE_S = 3.0
MAX_HOMES = 4096  # beginnings that are remembered
CHOICES = 3  # replicas that are ranked for a request: the next is tried when one is full
_NOWHERE: frozenset[str] = frozenset()


class Route(NamedTuple):
    """A replica for a request. `missing`: tokens of the prompt that it computes, as far as is known.

    `why`: "prefix" (it can resume a part), "load" (no replica can, or those have too much to do), "home" (no
    replica reports), "only" (there is one).
    """

    replica: str
    missing: int
    cost: float
    why: str


@dataclass(slots=True)
class _Replica:
    """What is known of one replica. `own_…`: of this gateway's requests, whether reported or not."""

    heard: float = -inf
    number: int = 0
    points: dict[bytes, None] = field(default_factory=dict)
    sent: dict[bytes, int] = field(default_factory=dict)  # expected points -> the newest lease that has it
    waiting_tokens: int = 0
    open_replies: int = 0
    own_tokens: int = 0
    own_open: int = 0
    unreported: dict[int, Route] = field(default_factory=dict)  # by lease: open, and in no report yet
    seed: int = 0  # of its name, see `seed_name`


class RoutingTable:
    """The replicas of a cluster, their resume points and loads. Not locked: a gateway's event loop calls it.

    `block_size`: tokens in a block, the same on all replicas. `is_paged`: whether every block of a prompt can
    be resumed; otherwise (recurrent state) only its end is expected before the replica reports. Times are
    seconds of any steady clock. `rng` breaks ties, so that gateways do not all take the same replica.
    """

    def __init__(self, block_size: int, *, is_paged: bool, rng: random.Random | None = None) -> None:
        self._block_size, self._is_paged, self._rng = block_size, is_paged, rng or random.Random()
        self._replicas: dict[str, _Replica] = {}
        self._loads: dict[str, float] = {}
        self._homes: dict[bytes, float] = {}  # when a beginning came last, the latest last
        self._at: dict[bytes, set[str]] = {}  # resume point -> replicas, reported or expected

    @property
    def num_points(self) -> int:
        """Different resume points, of all replicas."""
        return len(self._at)

    @property
    def replicas(self) -> Collection[str]:
        return self._replicas.keys()

    def loads(self) -> dict[str, float]:
        """What each replica has to do, in tokens of prompt."""
        return dict(self._loads)

    def add(self, replica: str) -> None:
        """A replica is there. While others report, it gets requests after its first report only."""
        if replica not in self._replicas:
            self._replicas[replica], self._loads[replica] = _Replica(seed=seed_name(replica.encode())), 0.0

    def remove(self, replica: str) -> None:
        """A replica has ended; what it could resume is gone. One that is not known is no error."""
        if (known := self._replicas.pop(replica, None)) is not None:
            del self._loads[replica]
            self._drop(replica, (*known.points, *known.sent))

    def hear(self, replica: str, report: ReplicaReport, now: float, newest: int | None = None) -> bool:
        """Take in a report. False: messages before it were lost, and the replica must report everything anew.

        After a gap the old points are dropped, because they may have been evicted meanwhile; loads are taken
        all the same. A message that comes late, behind newer ones, is ignored. `newest`: the last lease of
        this gateway that the replica had when it made the report; those behind it were on their way, and
        count until a report has them. None: it had all.
        """
        self.add(replica)
        known = self._replicas[replica]
        if report.number <= known.number and not report.begins:
            return True
        is_next = report.begins or (report.number == known.number + 1 and known.number > 0)
        self._forget_arrived(replica, known, inf if newest is None else newest)
        known.heard, known.number = now, report.number if is_next else 0
        known.waiting_tokens, known.open_replies = report.waiting_tokens, report.open_replies
        on_their_way = sum(weigh_load(route.missing, 1) for route in known.unreported.values())
        self._loads[replica] = weigh_load(report.waiting_tokens, report.open_replies) + on_their_way
        if report.begins or not is_next:
            self._drop(replica, [point for point in known.points if point not in known.sent])
            known.points.clear()
        if is_next:
            self._change_points(replica, known, report)
        return is_next

    def choose(
        self,
        chain: Sequence[bytes],
        num_tokens: int,
        now: float,
        *,
        home: bytes = b"",
        home_tokens: int = 0,
        excluded: Collection[str] = (),
    ) -> list[Route]:
        """Up to CHOICES replicas for a prompt, the best first; none if there is no replica.

        `chain`: the hashes of its whole blocks, in order, without that of the salt. `home`: the hash of its
        beginning up to the first message's end; the chain's first where it is empty. `home_tokens`: of that
        beginning. `excluded`: replicas that have refused this request, or ended under it.
        """
        able = [name for name in self._replicas if name not in excluded]
        heard = [name for name in able if now - self._replicas[name].heard <= STALE_S]
        if len(able) == 1:
            missing = count_missing(num_tokens, self._find(able[0], chain))
            return [Route(able[0], missing, missing + self._loads[able[0]], "only")]
        if not heard:
            return self._choose_homes(home or (chain[0] if chain else b""), num_tokens, able)
        slack = self._find_slack(home, home_tokens, now) if home_tokens else 0
        return self._choose_cheapest(chain, num_tokens, heard, home, slack)

    def record_sent(self, route: Route, chain: Sequence[bytes], key: int) -> None:
        """A request went there: until the replica reports it, expect the prompt's work and its points.

        `key`: of its lease; keys of one replica grow.
        """
        if (known := self._replicas.get(route.replica)) is None:
            return
        known.own_tokens, known.own_open = known.own_tokens + route.missing, known.own_open + 1
        self._loads[route.replica] += weigh_load(route.missing, 1)
        known.unreported[key] = route
        for point in chain if self._is_paged else chain[-1:]:
            known.sent[point] = key
            self._at.setdefault(point, set()).add(route.replica)

    def record_first_token(self, route: Route) -> None:
        """The prompt of a request is computed. What the replica itself reports is not changed by that."""
        if (known := self._replicas.get(route.replica)) is not None:
            known.own_tokens = max(known.own_tokens - route.missing, 0)

    def record_end(self, route: Route, key: int) -> None:
        """A request has ended there, however it did."""
        if (known := self._replicas.get(route.replica)) is not None:
            known.own_open = max(known.own_open - 1, 0)
            if known.unreported.pop(key, None) is not None:  # it came and went between two reports
                self._loads[route.replica] -= weigh_load(route.missing, 1)
                unsent = [point for point, newest in known.sent.items() if newest == key]
                for point in unsent:
                    del known.sent[point]
                self._drop(route.replica, [point for point in unsent if point not in known.points])

    def _forget_arrived(self, replica: str, known: _Replica, newest: float) -> None:
        """What leases up to this one were expected to bring there: the replica itself reports it now."""
        arrived = [point for point, key in known.sent.items() if key <= newest]
        self._drop(replica, [point for point in arrived if point not in known.points])
        for point in arrived:
            del known.sent[point]
        for key in [key for key in known.unreported if key <= newest]:
            del known.unreported[key]

    def _find_slack(self, home: bytes, home_tokens: int, now: float) -> int:
        """Tokens that may wait for a beginning's home, see `_choose_cheapest`; records that it has come."""
        last = self._homes.pop(home, None)
        self._homes[home] = now
        if len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        if last is None:
            return min(NEW_HOME_TOKENS, home_tokens)
        return home_tokens if now - last >= RARE_S else 0

    def _choose_cheapest(
        self, chain: Sequence[bytes], num_tokens: int, heard: Sequence[str], home: bytes, slack: int
    ) -> list[Route]:
        """The exact minimum without a look at every replica's points.

        Walked from the longest prefix down. A replica that is met later has less of the prompt and at least
        the least load of all, which bounds its cost from below: the walk ends when enough routes are below
        that.

        While no replica has its beginning, a prompt goes to the first by the beginning's hash, of those with
        at most `slack` tokens more to do than the least. A hybrid keeps a shared beginning from its third
        reader on: spread by load, readers would be each replica's first, and none could resume it. What may
        wait for that is what it saves, the tokens of the beginning. Once one has it, load alone spreads it.
        """
        tie, loads, able = self._rng.random, self._loads, set(heard)
        idle = nsmallest(CHOICES, ((loads[name], tie(), name) for name in heard))
        least, routes = idle[0][0], dict[str, tuple[float, float, Route]]()
        enough = inf  # the cost of the last of CHOICES routes
        for num_blocks in range(len(chain), 0, -1):
            missing = count_missing(num_tokens, num_blocks * self._block_size)
            if enough <= missing + least:
                break
            new = (self._at.get(chain[num_blocks - 1], _NOWHERE) & able) - routes.keys()
            for name in sorted(new):  # the same draws for the same names
                cost = missing + loads[name]
                routes[name] = cost, tie(), Route(name, missing, cost, "prefix")
            if new and len(routes) >= CHOICES:
                enough = nsmallest(CHOICES, routes.values())[-1][0]
        best = min(routes.values(), default=None)
        is_new = slack and not self._at.get(home, _NOWHERE) & able
        if is_new and (best is None or best[0] >= num_tokens + least):
            near = (name for name in heard if loads[name] <= least + slack)
            by_hash = nsmallest(CHOICES, near, key=partial(self._order_home, seed_name(home)))
            return [Route(name, num_tokens, num_tokens + loads[name], "load") for name in by_hash]
        for load, drawn, name in idle:
            if name not in routes:
                cost = num_tokens + load
                routes[name] = cost, drawn, Route(name, num_tokens, cost, "load")
        return [route for _, _, route in nsmallest(CHOICES, routes.values())]

    def _choose_homes(self, home: bytes, num_tokens: int, able: Sequence[str]) -> list[Route]:
        """By the hash of the beginning, and by this gateway's own open requests: nothing else is known."""
        own = {name: self._replicas[name] for name in able}
        loads: dict[str, float] = {name: weigh_load(r.own_tokens, r.own_open) for name, r in own.items()}
        order = order_by_home(home, loads)[:CHOICES]
        return [Route(name, num_tokens, num_tokens + loads[name], "home") for name in order]

    def _order_home(self, seed: int, replica: str) -> int:
        return order_home(seed, self._replicas[replica].seed)

    def _find(self, replica: str, chain: Sequence[bytes]) -> int:
        """Tokens of a prompt that a replica can resume."""
        ends = range(len(chain), 0, -1)
        blocks = next((n for n in ends if replica in self._at.get(chain[n - 1], ())), 0)
        return blocks * self._block_size

    def _change_points(self, replica: str, known: _Replica, report: ReplicaReport) -> None:
        gone = [point for point in report.removed if point in known.points]
        self._drop(replica, [point for point in gone if point not in known.sent])
        for point in gone:
            del known.points[point]
        for point in report.added:
            known.points[point] = None
            self._at.setdefault(point, set()).add(replica)
        while len(known.points) > MAX_POINTS:
            oldest = next(iter(known.points))
            del known.points[oldest]
            self._drop(replica, (oldest,))

    def _drop(self, replica: str, points: Collection[bytes]) -> None:
        for point in points:
            if (here := self._at.get(point)) is not None:
                here.discard(replica)
                if not here:
                    del self._at[point]
