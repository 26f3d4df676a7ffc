"""Where should a chat's next turn run? Routing policies over 1 to 1,024 simulated replicas, by events.

    python benchmarks/cluster_simulation.py --replicas 1,16,256 --policies cost,load,round_robin --seconds 120

One JSON object a line. The policy `cost` is `plait.cluster`'s own routing table, reports included. A
simulated replica computes prompts one after the other at PREFILL tokens a second; its open replies share
DECODE tokens a second, at most EACH for one. Chats begin with one of some shared beginnings, of Zipf's
popularity; each turn repeats the chat so far, gets a reply and pauses. A hybrid is resumed at snapshots: the
ends of each prompt and reply, and a shared beginning from its third reader on. A paged model is resumed
behind every block.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import struct
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plait.cluster.costs import OPEN_REPLY_TOKENS, order_by_home
from plait.cluster.resume_points import ResumePoints
from plait.cluster.routing_table import Route, RoutingTable

BLOCK = 16
PREFILL, DECODE, EACH = 4000.0, 900.0, 60.0  # tokens a second
MEMORY = {"hybrid": 192, "paged": 400_000 // BLOCK}  # snapshots, blocks of a replica
NEW_TOKENS, REPLY_TOKENS, TURNS = (4.3, 0.8), (4.9, 0.7), 5.5  # of log-normal laws; the mean of further turns
PAUSE = (2.3, 0.9)  # seconds, log-normal
WARM = 0.3  # of the time, not counted
POLICIES = ("cost", "home", "load", "two", "round_robin")


class Chain(Sequence[bytes]):
    """The names of a prompt's whole blocks, of its shared beginning, then the chat's own. Made when read."""

    def __init__(self, chat: int, beginning: int, shared_blocks: int, num_blocks: int) -> None:
        self._chat, self._beginning, self._shared, self._length = chat, beginning, shared_blocks, num_blocks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:  # type: ignore[override]
        if isinstance(index, slice):
            return [self.name(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self.name(index % self._length)

    def name(self, index: int) -> bytes:
        owner = self._beginning if index < self._shared else self._chat
        return struct.pack(">QQ", owner, index)


@dataclass(slots=True)
class Chat:
    key: int
    beginning: int
    shared: int  # tokens
    length: int  # tokens so far
    turns: int
    computed: int = 0  # tokens that one big cache would find

    def chain(self, tokens: int) -> Chain:
        return Chain(self.key, self.beginning, self.shared // BLOCK, tokens // BLOCK)


@dataclass(slots=True)
class Turn:
    chat: Chat
    prompt: int
    reply: int
    came: float
    gateway: int
    route: Route | None = None
    key: int = 0
    left: float = 0.0  # tokens until the prompt is computed, or the reply ends


@dataclass(slots=True)
class Replica:
    """A cache of resume points, least recently used first, and the work of one engine."""

    kind: str
    points: ResumePoints = field(default_factory=ResumePoints)
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    readers: Counter[int] = field(default_factory=Counter)
    queue: list[Turn] = field(default_factory=list)
    open: list[Turn] = field(default_factory=list)
    at: float = 0.0
    version: int = 0
    served: int = 0
    times_memory: int = 1

    def waiting_tokens(self) -> int:
        return int(sum(turn.left for turn in self.queue))

    def load(self) -> float:
        return self.waiting_tokens() + OPEN_REPLY_TOKENS * (len(self.queue) + len(self.open))

    def find(self, chain: Chain) -> int:
        """Tokens of the longest prefix that is there; it becomes the latest used."""
        for blocks in range(len(chain), 0, -1):
            name = chain.name(blocks - 1)
            if name in self.cache:
                for used in range(blocks) if self.kind == "paged" else (blocks - 1,):
                    if (one := chain.name(used)) in self.cache:
                        self.cache.move_to_end(one)
                return blocks * BLOCK
        return 0

    def keep(self, chat: Chat, tokens: int, *, is_prompt: bool) -> None:
        """What was computed up to here can be resumed."""
        chain = chat.chain(tokens)
        if self.kind == "paged":
            names = [chain.name(i) for i in range(len(chain))]
        else:
            names = [chain.name(len(chain) - 1)] if chain else []
            self.readers[chat.beginning] += is_prompt
            if is_prompt and self.readers[chat.beginning] >= 3:
                names.append(chain.name(chat.shared // BLOCK - 1))
        for name in names:
            if name not in self.cache:
                self.points.add(name)
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > MEMORY[self.kind] * self.times_memory:
            self.points.remove(self.cache.popitem(last=False)[0])

    def rates(self) -> tuple[float, float]:
        """Tokens a second: of the prompt that is computed, of each open reply."""
        both = bool(self.queue and self.open)
        each = min(EACH, DECODE / max(len(self.open), 1))
        return PREFILL * (0.8 if both else 1.0), each * (0.5 if both else 1.0)

    def run_to(self, now: float) -> None:
        prefill, each = self.rates()
        passed, self.at = now - self.at, now
        if self.queue:
            self.queue[0].left -= passed * prefill
        for turn in self.open:
            turn.left -= passed * each

    def next_end(self) -> float | None:
        prefill, each = self.rates()
        ends = [self.queue[0].left / prefill] if self.queue else []
        ends += [min(turn.left for turn in self.open) / each] if self.open else []
        return self.at + max(min(ends), 0.0) + 1e-9 if ends else None


@dataclass(slots=True)
class Tally:
    """What is counted after the warm-up."""

    waits: list[float] = field(default_factory=list)
    found: int = 0
    needed: int = 0
    ideal: int = 0
    one: int = 0
    choices: int = 0
    choose_s: float = 0.0
    hear_s: float = 0.0
    reports: int = 0
    changes: int = 0


class Simulation:
    """One run of a policy. `gateways` each know what they sent themselves and what replicas report."""

    def __init__(
        self,
        policy: str,
        num_replicas: int,
        *,
        kind: str = "hybrid",
        load: float = 0.7,
        seconds: float = 120.0,
        gateways: int = 2,
        every: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.policy, self.seconds, self.every, self.rng = policy, seconds, every, random.Random(seed)
        self.replicas = [Replica(kind) for _ in range(num_replicas)]
        self.one = Replica(kind, times_memory=num_replicas)  # what a cache of all memory would find
        self.names = [f"replica-{i}" for i in range(num_replicas)]
        self.index = {name: i for i, name in enumerate(self.names)}
        seeds = [random.Random(f"{seed} {i}") for i in range(gateways)]
        self.tables = [RoutingTable(BLOCK, is_paged=kind == "paged", rng=rng) for rng in seeds]
        self.beginnings = [(i, self.rng.choice((256, 512, 1024, 2048))) for i in range(24)]
        self.weights = [1 / (i + 1) for i in range(24)]
        # Were everything found, a turn takes 180 tokens of reply and 160 of prompt; a chat has 6.5 turns.
        self.rate = load * num_replicas / (180 / DECODE + 160 / PREFILL) / (TURNS + 1)
        self.events: list[tuple[float, int, str, object]] = []
        self.count = self.turn_number = 0
        self.tally = Tally()

    def put(self, when: float, kind: str, what: object = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, kind, what))

    def run(self) -> dict[str, object]:
        """Until `seconds` have passed; the row that is printed."""
        self.put(self.rng.expovariate(self.rate), "chat")
        self.put(0.0, "report")
        while self.events[0][0] <= self.seconds:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == "chat":
                self.begin_chat(now)
            elif kind == "turn" and isinstance(what, Chat):
                self.begin_turn(what, now)
            elif kind == "report":
                self.report(now)
            elif isinstance(what, tuple) and self.replicas[what[0]].version == what[1]:
                self.work(what[0], now)
        return self.row()

    def is_counted(self, now: float) -> bool:
        return now > WARM * self.seconds

    def begin_chat(self, now: float) -> None:
        self.put(now + self.rng.expovariate(self.rate), "chat")
        beginning, shared = self.rng.choices(self.beginnings, self.weights)[0]
        turns = 1 + min(30, int(self.rng.expovariate(1 / TURNS)))
        self.begin_turn(Chat(1000 + self.count, beginning, shared, shared, turns, shared), now)

    def begin_turn(self, chat: Chat, now: float) -> None:
        new, reply = (max(8, int(self.rng.lognormvariate(*law))) for law in (NEW_TOKENS, REPLY_TOKENS))
        turn = Turn(chat, chat.length + new, reply, now, self.rng.randrange(len(self.tables)))
        began = time.thread_time()
        at = self.choose(turn, now)
        taken = time.thread_time() - began
        replica, chain = self.replicas[at], chat.chain(turn.prompt)
        replica.run_to(now)
        found, one = (min(cache.find(chain), turn.prompt - 1) for cache in (replica, self.one))
        turn.left = float(turn.prompt - found)
        replica.queue.append(turn)
        replica.served += 1
        if self.is_counted(now):
            tally = self.tally
            tally.found, tally.needed = tally.found + found, tally.needed + turn.prompt
            tally.ideal += chat.computed
            tally.one += one
            tally.choices, tally.choose_s = tally.choices + 1, tally.choose_s + taken
        self.plan(at)

    def choose(self, turn: Turn, now: float) -> int:
        """The replica for a turn, by the policy. All but `cost` know the exact load of this moment."""
        count = len(self.replicas)
        self.turn_number += 1
        if self.policy == "cost":
            table, chain = self.tables[turn.gateway], turn.chat.chain(turn.prompt)
            shared = turn.chat.shared
            home = chain.name(shared // BLOCK - 1)
            turn.route = table.choose(chain, turn.prompt, now, home=home, home_tokens=shared)[0]
            turn.key = self.turn_number
            table.record_sent(turn.route, chain, turn.key)
            return self.index[turn.route.replica]
        if self.policy == "round_robin" or count == 1:
            return self.turn_number % count
        if self.policy == "two":
            return min(self.rng.sample(range(count), 2), key=lambda i: self.replicas[i].load())
        if self.policy == "load":
            return min(range(count), key=lambda i: (self.replicas[i].load(), self.rng.random()))
        loads = {name: self.replicas[i].load() for name, i in self.index.items()}
        return self.index[order_by_home(struct.pack(">Q", turn.chat.key), loads)[0]]

    def report(self, now: float) -> None:
        """Each replica reports to every gateway."""
        self.put(now + self.every, "report")
        for i, replica in enumerate(self.replicas if self.policy == "cost" else ()):
            replica.run_to(now)
            for message in replica.points.report(
                replica.waiting_tokens(), len(replica.queue) + len(replica.open)
            ):
                began = time.thread_time()
                for table in self.tables:
                    assert table.hear(self.names[i], message, now), "no message is lost here"
                if self.is_counted(now):
                    self.tally.hear_s += time.thread_time() - began
                    self.tally.reports += 1
                    self.tally.changes += len(message.added) + len(message.removed)
            self.plan(i)

    def work(self, at: int, now: float) -> None:
        """A prompt is computed, or replies have ended."""
        replica = self.replicas[at]
        replica.run_to(now)
        if replica.queue and replica.queue[0].left <= 1e-6:
            turn = replica.queue.pop(0)
            if self.is_counted(now):
                self.tally.waits.append(now - turn.came)
            if turn.route is not None:
                self.tables[turn.gateway].record_first_token(turn.route)
            for cache in (replica, self.one):
                cache.keep(turn.chat, turn.prompt, is_prompt=True)
            turn.left = float(turn.reply)
            replica.open.append(turn)
        for turn in [turn for turn in replica.open if turn.left <= 1e-6]:
            replica.open.remove(turn)
            self.end_turn(replica, turn, now)
        self.plan(at)

    def end_turn(self, replica: Replica, turn: Turn, now: float) -> None:
        chat = turn.chat
        chat.length = chat.computed = turn.prompt + turn.reply
        for cache in (replica, self.one):
            cache.keep(chat, chat.length, is_prompt=False)
        if turn.route is not None:
            self.tables[turn.gateway].record_end(turn.route, turn.key)
        chat.turns -= 1
        if chat.turns:
            self.put(now + self.rng.lognormvariate(*PAUSE), "turn", chat)

    def plan(self, at: int) -> None:
        replica = self.replicas[at]
        replica.version += 1
        if (end := replica.next_end()) is not None:
            self.put(end, "work", (at, replica.version))

    def row(self) -> dict[str, object]:
        tally, num = self.tally, len(self.replicas)
        waits, counted = sorted(tally.waits), (1 - WARM) * self.seconds
        served = [replica.served for replica in self.replicas]
        row: dict[str, object] = {
            "policy": self.policy,
            "replicas": num,
            "turns": tally.choices,
            "found_share": round(tally.found / max(tally.needed, 1), 4),
            "one_replica_share": round(tally.one / max(tally.needed, 1), 4),
            "one_cache_share": round(tally.ideal / max(tally.needed, 1), 4),
            "first_token_p50_ms": round(1e3 * waits[len(waits) // 2], 1),
            "first_token_p99_ms": round(1e3 * waits[int(len(waits) * 0.99)], 1),
            "most_served_over_mean": round(max(served) * num / sum(served), 3),
            "choose_us": round(1e6 * tally.choose_s / max(tally.choices, 1), 1),
        }
        if self.policy == "cost":
            row |= {
                "points": self.tables[0].num_points,
                "changes_per_replica_s": round(tally.changes / num / counted, 2),
                "hear_us": round(1e6 * tally.hear_s / max(tally.reports, 1) / len(self.tables), 1),
            }
        return row


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    for num in map(int, arguments.replicas.split(",")):
        for policy in arguments.policies.split(","):
            yield Simulation(
                policy,
                num,
                kind=arguments.kind,
                load=arguments.load,
                seconds=arguments.seconds,
                gateways=arguments.gateways,
                every=arguments.every,
                seed=arguments.seed,
            ).run()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", default="1,16,64", help="numbers of replicas, 1 to 1024")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--kind", default="hybrid", choices=tuple(MEMORY), help="what can be resumed")
    parser.add_argument("--load", type=float, default=0.7, help="share of what replicas can do")
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated time of each run")
    parser.add_argument("--gateways", type=int, default=2, help="tables; turns come to any of them")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between reports")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(words)
    if bad := [n for n in found.replicas.split(",") if not n.isdigit() or not 1 <= int(n) <= 1024]:
        parser.error(f"--replicas: {bad[0]!r} is not a number from 1 to 1024")
    if unknown := set(found.policies.split(",")) - set(POLICIES):
        parser.error(f"--policies: {min(unknown)!r} is not one of {', '.join(POLICIES)}")
    for name in ("load", "seconds", "gateways", "every"):
        if not 0 < getattr(found, name) < float("inf"):
            parser.error(f"--{name}: {getattr(found, name)} is not a positive number")
    return found


def main() -> None:
    for row in rows(parse()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
