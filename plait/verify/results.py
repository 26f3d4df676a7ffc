"""What `plait verify` finds: the replies of a cell, and where they differ from those of the plain run."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from plait.request import Event, TokenLogprobs
from plait.verify.trace import FirstDifference


@dataclass(slots=True)
class VerifyReply:
    """The reply to one request: its tokens and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None
    is_done: bool = False
    num_cached: int = 0  # tokens of the prompt that were not computed for it

    def on_event(self, event: Event) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.error = event.error or self.error
        self.is_done = self.is_done or event.finish_reason is not None
        self.num_cached = max(self.num_cached, event.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that has run: replies by (number of the wave, request), and what happened meanwhile."""

    replies: Mapping[tuple[int, str], VerifyReply]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a reply that differs from the plain run, in itself or in its log-probability.

    `index`: in the reply; `position`: in the sequence. `gap`: between the two best log-probabilities of the
    plain run there, which is the gap between their logits. `place`: the first op with numbers that diverge;
    without one `note` says why.
    """

    cell: str
    request: str
    wave: int
    index: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None = None
    off_by: float | None = None  # the log-probabilities of the same token, or of its alternatives
    place: FirstDifference | None = None
    note: str = ""

    @property
    def is_token(self) -> bool:
        return self.expected != self.found


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell compared. `proof`: the count that must not be zero for it to show anything (`Cell.proof`).

    `digest`: of its replies, their tokens and the bits of their log-probabilities.
    """

    cell: str
    num_replies: int
    num_tokens: int
    differences: tuple[Difference, ...]
    counts: Mapping[str, int]
    proof: str | None = None
    digest: str = ""

    @property
    def happened(self) -> bool:
        """Whether the effect that the cell tests came about."""
        return self.proof is None or bool(self.counts.get(self.proof))

    @property
    def num_different(self) -> int:
        """How many replies have another token."""
        return sum(d.is_token for d in self.differences)

    @property
    def num_rounded(self) -> int:
        """How many replies have the same tokens, but log-probabilities that differ in some bit."""
        return len(self.differences) - self.num_different


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The device and the formats of a run. `loose`: ops with rounding that may depend on the batch."""

    device: str
    dtype: str
    kv_dtype: str
    step: str
    loose: Mapping[str, str]
    state_dtype: str = "float32"

    @property
    def is_promised(self) -> bool:
        """Whether Plait promises the same bits for every cell."""
        return not self.loose


def digest_replies(replies: Mapping[tuple[int, str], VerifyReply]) -> str:
    """A hash of every token and of the bits of every log-probability."""
    made = blake2b(digest_size=16)
    for key in sorted(replies):
        reply = replies[key]
        made.update(repr((*key, reply.token_ids)).encode())
        for one in reply.logprobs:
            pairs = [(one.token_id, one.logprob), *one.top]
            made.update(b"".join(struct.pack("<qd", *pair) for pair in pairs))
    return made.hexdigest()
