"""What rank 0 and the other ranks exchange: msgpack over a socket pair, and never code."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from plait.config import MIB, EngineConfig
from plait.errors import EngineError
from plait.ops.chip import Chip
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan
from plait.typed_values import msgpack_decoder

MAX_NBYTES = 64 * MIB  # a plan of long prompts, with the masks of guided replies


class RankMessage(msgspec.Struct, array_like=True, frozen=True):
    """A message is an array: its tag, then its fields."""


class Join(RankMessage, frozen=True, tag=1):
    """The first message: which rank to be, of which model. `meeting`: the file at which all ranks meet."""

    index: int
    size: int
    shares: int
    block: int
    whole_experts: bool
    meeting: str
    model: str
    config: EngineConfig


class Prepare(RankMessage, frozen=True, tag=2):
    """Make the memory of sequences, and a runner over it; what was there goes. It has the sizes of rank 0."""

    config: EngineConfig
    num_blocks: dict[str, int]
    num_slots: int
    block_size: int
    max_model_len: int
    banned: tuple[int, ...]


class Step(RankMessage, frozen=True, tag=3):
    """Run a plan and sample. `number` counts the steps."""

    number: int
    plan: StepPlan
    sampling: SamplingBatch


class Score(RankMessage, frozen=True, tag=4):
    """Compute the logits of a prompt, which rank 0 alone keeps."""

    token_ids: tuple[int, ...]
    chunk_size: int


class Leave(RankMessage, frozen=True, tag=5):
    """End."""


class MeasureMemory(RankMessage, frozen=True, tag=6):
    """Run the steps by which memory is divided, with contexts of so many tokens, together with rank 0."""

    config: EngineConfig
    max_model_len: int


class Joined(RankMessage, frozen=True, tag=4):
    """The headers are read and the device is there: the rank is about to meet the others."""


class RankGpu(msgspec.Struct, frozen=True):
    """What a rank's kernels follow from. `capability`: 90 for sm_90; `rejected`: trials that went wrong."""

    name: str
    capability: int
    rejected: tuple[str, ...]

    @classmethod
    def of(cls, chip: Chip | None) -> RankGpu | None:
        if chip is None:
            return None
        return cls(chip.name, chip.capability, tuple(sorted(key for key, why in chip.trials.items() if why)))

    def why_unlike(self, other: RankGpu) -> str | None:
        """Why ranks on both would round otherwise, and so choose other experts, or None."""
        if self.capability != other.capability:
            return (
                f"has {other.name} (sm_{other.capability}), and rank 0 {self.name} (sm_{self.capability}): "
                "their kernels round otherwise. Name GPUs of one kind in CUDA_VISIBLE_DEVICES"
            )
        apart = sorted(set(self.rejected) ^ set(other.rejected))
        if not apart:
            return None
        return (
            f"has other kernels than rank 0: {', '.join(apart[:3])} went wrong in a trial on one GPU alone. "
            "See plait doctor of each GPU, or give --ops reference"
        )


class RankLoaded(RankMessage, frozen=True, tag=1):
    """The weights are there. `agreement`: a hash of all that ranks must agree on; `gpu`: None on CPUs."""

    agreement: str
    weights_nbytes: int
    gpu: RankGpu | None = None


class Stepped(RankMessage, frozen=True, tag=2):
    """A step has run. `digest`: of its message and of the tokens that came of it."""

    number: int
    digest: bytes


class Failed(RankMessage, frozen=True, tag=3):
    """The rank ends, for this reason."""

    text: str


class MemoryMeasured(RankMessage, frozen=True, tag=5):
    """The steps of `MeasureMemory` have run. `nbytes`: what a rank has left for state."""

    nbytes: int


class LoadAdapter(RankMessage, frozen=True, tag=7):
    """Put the adapter at a path into a slot."""

    slot: int
    path: str


class ClearAdapter(RankMessage, frozen=True, tag=8):
    """Free a slot."""

    slot: int


class AdapterLoaded(RankMessage, frozen=True, tag=6):
    """The answer to `LoadAdapter`. `digest`: of its numbers; `why`: it is not loaded, the slot is free."""

    digest: str
    why: str = ""


FromLeader = Join | Prepare | Step | Score | Leave | MeasureMemory | LoadAdapter | ClearAdapter
FromRank = Joined | RankLoaded | Stepped | Failed | MemoryMeasured | AdapterLoaded
_ENCODE = msgspec.msgpack.Encoder()
_FROM_LEADER: msgspec.msgpack.Decoder[FromLeader] = msgpack_decoder(FromLeader)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgpack_decoder(FromRank)


def encode(message: RankMessage) -> bytes:
    return _ENCODE.encode(message)


def receive_command(connection: Connection) -> tuple[FromLeader, bytes]:
    """The next message to a rank, and its bytes. Raises EOFError or OSError when rank 0 has gone."""
    data = connection.recv_bytes(MAX_NBYTES)
    return _FROM_LEADER.decode(data), data


def receive_report(connection: Connection) -> FromRank:
    """The next message of a rank. Raises EOFError or OSError when it has gone, EngineError if it is none."""
    try:
        return _FROM_RANK.decode(connection.recv_bytes(MAX_NBYTES))
    except msgspec.MsgspecError as error:
        raise EngineError(f"a rank sent what is no message: {error}") from error


def digest_of(message: bytes, answers: Sequence[Sampled]) -> bytes:
    """A hash of a step and its tokens, 16 bytes: the same on every rank."""
    found = hashlib.blake2b(message, digest_size=16)
    found.update(_ENCODE.encode([answer.token_ids for answer in answers]))
    return found.digest()
