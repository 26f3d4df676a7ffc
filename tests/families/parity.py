"""A family's decoder, run as the engine would: ragged batches, shuffled blocks, memory full of NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.storages import Checkpoint
from plait.checkpoint.weights import Target, Weights
from plait.families.common.resolved import Resolved
from plait.families.resolve import resolve
from plait.memory import block_groups
from plait.model.decoder import Decoder
from plait.ops.chip import Chip
from plait.quant.weight import as_tensor
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore

CPU, BLOCK, LONGEST = torch.device("cpu"), 4, 23
# tokens of each sequence per step: long and short chunks next to decodes, then decodes alone
PIECES = ((5, 0), (1, 7), (9, 1), (1, 1), (1, 4), (1, 1), (1, 1), (1, 1), (2, 1), (1, 0))


class Memory(dict[str, Tensor]):
    """Tensors as a checkpoint."""

    def names(self) -> Sequence[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def format_of(self, name: str) -> str:
        return str(self[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Tensor:
        return self[name]


def resolved(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    gguf: Mapping[str, Any] | None = None,
) -> Resolved:
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}

    def numbers(name: str) -> Tensor:
        return as_tensor(checkpoint.read(name))

    return resolve(config, shapes, read=numbers, overrides=overrides, gguf=gguf)


def decoder(
    found: Resolved,
    checkpoint: Checkpoint,
    chip: Chip | None = None,
    dtype: torch.dtype = torch.float32,
    kept: str = "model",
) -> Decoder:
    """The model, every tensor of the checkpoint used. `chip`: with the ops that this GPU would bind; `kept`:
    what keys, values and latents are kept in."""
    target = Target(CPU, dtype, LONGEST, found.spec.hidden_size, chip=chip, kv_dtype=kept)
    weights = Weights(checkpoint, found.names, target)
    built = Decoder(found.spec, weights)
    weights.check_all_used()
    return built


class Session:
    """Two sequences of one model in one memory."""

    def __init__(self, model: Decoder, block_size: int | None = None) -> None:
        self.model, self.groups = model, block_groups(model.states)
        blocks = {g.name: 32 for g in self.groups}
        self.store = StateStore(model.states, blocks, 6, block_size or BLOCK, CPU, torch.float32)
        order = torch.randperm(31, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = [tuple(order[:8].tolist()), tuple(order[8:16].tolist())]
        self.slots = (4, 2)
        self.store.zero_slots(self.slots)

    def step(self, pieces: Sequence[tuple[int, int, Tensor]]) -> list[Tensor]:
        """[(sequence, start, ids)] in one batch -> logits of each piece, in the order given."""
        order = sorted(range(len(pieces)), key=lambda n: not (len(pieces[n][2]) == 1 and pieces[n][1] > 0))
        chunks = []
        for n in order:
            seq, start, ids = pieces[n]
            tables = (self.tables[seq],) * len(self.groups)
            chunks.append(Chunk(seq, start, tuple(ids.tolist()), tables, self.slots[seq], len(ids)))
        out = self.model(
            build_batch(StepPlan(0, tuple(chunks)), self.groups, self.store.block_size, CPU), self.store
        )
        parts = out.split([len(c.token_ids) for c in chunks])
        return [parts[order.index(n)] for n in range(len(pieces))]


@torch.inference_mode()
def whole(model: Decoder, ids: Tensor) -> Tensor:
    return Session(model).step([(0, 0, ids)])[0]


@torch.inference_mode()
def in_pieces(model: Decoder, ids: Sequence[Tensor], block_size: int | None = None) -> list[Tensor]:
    """Both sequences side by side in `PIECES`; the logits of all their tokens."""
    session, done = Session(model, block_size), [0, 0]
    parts: list[list[Tensor]] = [[], []]
    for counts in PIECES:
        step = [(s, done[s], ids[s][done[s] : done[s] + n]) for s, n in enumerate(counts) if n]
        for (s, _, piece), logits in zip(step, session.step(step), strict=True):
            parts[s].append(logits)
            done[s] += len(piece)
    return [torch.cat(p) for p in parts]


def check_description(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    wanted: Sequence[Tensor],
    ids: Sequence[Tensor],
) -> None:
    """A model of a plain description: its logits, [T, vocab] of each of two texts, whole and in chunks."""
    memory = Memory({key: w.float() for key, w in tensors.items()})
    model = decoder(resolved(memory, config), memory)
    assert worst(whole(model, ids[0]).double(), wanted[0]) <= 1e-4
    for found, want in zip(in_pieces(model, ids), wanted, strict=True):
        assert worst(found.double(), want) <= 1e-4


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; the shapes must agree."""
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())
