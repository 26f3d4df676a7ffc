"""The records of a lease table: its streams, their leases, and the replicas that it is connected with."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.cluster.routing_table import Route
from plait.cluster.wire import Beat, ReplicaCard
from plait.worker.open_stream import OpenStream


@dataclass(slots=True, eq=False)
class ClusterStream(OpenStream):
    """An open request of a gateway. `chain`: hashes of its prompt's whole blocks; `home`: of its
    beginning, of `home_tokens`.

    `num_charged`: engines that ended with it in their last step; `num_losses`: replicas that were lost under
    it. `is_suspect`: it must pass the place alone. `refused_by`: replicas without a place for it just now.
    `equality`: of the card of the replica that computed its tokens, "" without any.
    """

    chain: tuple[bytes, ...] = ()
    home: bytes = b""
    home_tokens: int = 0
    lease: Lease | None = None
    num_charged: int = 0
    num_losses: int = 0
    is_suspect: bool = False
    equality: str = ""
    refused_by: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Lease:
    """A replica's share of a stream. `number`: its key."""

    number: int
    stream: ClusterStream
    replica: str
    route: Route
    began_s: float
    has_spoken: bool = False

    @property
    def request_id(self) -> str:
        """The request's id in the replica: an engine may still have an older lease of the same request."""
        return f"{self.stream.request.id}~{self.number}"


@dataclass(slots=True, eq=False)
class KnownReplica:
    """A replica with a connection. `is_ready`: its engine works; `is_silent`: no sign of life for too long.

    `is_leaving`: it finishes what it has; `has_announced`: it has announced that itself.
    """

    name: str
    card: ReplicaCard
    heard_s: float
    is_ready: bool = True
    is_silent: bool = False
    is_leaving: bool = False
    has_announced: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    beat: Beat | None = None

    @property
    def takes(self) -> bool:
        """Whether it may get a new lease."""
        full = len(self.leases) >= self.card.max_open
        return self.is_ready and not (self.is_silent or self.is_leaving or full)

    @property
    def state(self) -> str:
        """For metrics and messages: ready, replacing (its engine), silent or leaving."""
        if self.is_leaving or self.is_silent:
            return "leaving" if self.is_leaving else "silent"
        return "ready" if self.is_ready else "replacing"
