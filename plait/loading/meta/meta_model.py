"""A model's states and bound ops from its headers alone: no tensor is read.

The decoder is built on torch's meta device over tensors that have a shape and no content. So a missing or odd
tensor is found here too, before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from plait.checkpoint.divided import Cuts, StoredPart
from plait.checkpoint.storages import Checkpoint, is_dtype
from plait.checkpoint.weights import Target, Weights
from plait.errors import ConfigError
from plait.families.common.resolved import Resolved
from plait.loading.meta.shapes_only import ShapesOnly
from plait.memory import SlotState, State
from plait.model.decoder import Decoder
from plait.model.divide import divide_model
from plait.model.mtp import FC, MtpHead
from plait.ops.ranks import Alone
from plait.ops.registry import Bound, Op
from plait.partition import Rank
from plait.quant.weight import Weight
from plait.spec.model import ModelSpec


class Outline:
    """A checkpoint without its content: every tensor is on the meta device."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def format_of(self, name: str) -> str:
        return self._checkpoint.format_of(name)

    def read(self, name: str) -> Tensor:
        """An empty tensor of the shape that a read gives: a quantized stack is one matrix of all its rows."""
        shape = self.shape(name)
        if len(shape) > 2 and not is_dtype(self.format_of(name)):
            shape = (prod(shape[:-1]), shape[-1])
        return torch.empty(shape, device="meta")


class ReadOrder:
    """A feed without numbers that keeps which parts are read as they are stored, in which order."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self.parts: dict[tuple[str, StoredPart], None] = {}

    def has(self, name: str, part: StoredPart) -> bool:
        return True

    def take(self, name: str, part: StoredPart) -> Weight | Tensor:
        self.parts[name, part] = None
        return part.keep(self._outline.read(name))


def read_order(resolved: Resolved, checkpoint: Checkpoint, target: Target) -> list[tuple[str, StoredPart]]:
    """The tensors that building the model for `target` reads as they are stored, with the parts of its rank.

    Each part is there once, in order. Tensors of recipes are not among them. Raises MissingTensor,
    ShapeMismatch.
    """
    dry, outline = meta_target(resolved.spec), Outline(checkpoint)
    dry.kv_dtype, dry.block_size = target.kv_dtype, target.block_size
    dry.state_dtype = target.state_dtype
    dry.quantize = target.quantize
    dry.feed = order = ReadOrder(outline)
    dry.cuts = meta_cuts(resolved.spec, target.comm.rank)
    part, _ = divide_model(resolved.spec, target.comm.rank)
    _build(part, Weights(outline, resolved.names, dry))
    return [*order.parts]


class NotedOps(Weights):
    """Weights that note the ops that a model binds."""

    def bind(self, op: Op, **sizes: object) -> Bound:
        self._note(op)
        if isinstance(kind := sizes.get("kind"), str):
            self.noted[op.name].add(kind)
        return super().bind(op, **sizes)

    def bind_pair(self, writer: Op, reader: Op, **sizes: object) -> tuple[Bound | None, Bound]:
        self._note(writer)
        self._note(reader)
        return super().bind_pair(writer, reader, **sizes)

    @property
    def noted(self) -> dict[str, set[str]]:
        """The names so far, of all views, each with the kinds that it is bound for."""
        found: dict[str, set[str]] = self.shared("names of ops", lambda _: dict[str, set[str]]())
        return found

    def _note(self, op: Op) -> None:
        self.noted.setdefault(op.name, set())
        for part in (*op.composition.parts, *op.composition.given) if op.composition else ():
            if part.name not in self.noted:  # an op may be a part of itself
                self._note(part)


def list_ops(resolved: Resolved, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """The names of the ops that a model binds, and of those that they replace, each with its kinds.

    A kind is an activation; storages are not among them. A head for multi-token prediction is part of it,
    used or not: `plait verify` runs it, too. Raises MissingTensor.
    """
    weights = NotedOps(Outline(checkpoint), resolved.names, meta_target(resolved.spec))
    with ShapesOnly():
        trunk = Decoder(resolved.spec, weights)
        if resolved.spec.mtp is not None and FC in weights:
            MtpHead(resolved.spec, weights, trunk)
    return weights.noted


def outline_mtp(resolved: Resolved, checkpoint: Checkpoint, dry: Target) -> tuple[MtpHead, list[str]]:
    """A model's head for multi-token prediction, of shapes alone, and the names of its own tensors.

    `dry`: what it is built for. Raises MissingTensor.
    """
    weights, read = Weights(Outline(checkpoint), resolved.names, dry), dict[str, None]()
    with ShapesOnly():
        trunk = Decoder(resolved.spec, weights)
        dry.on_read = lambda name, _: read.setdefault(name)
        return MtpHead(resolved.spec, weights, trunk), [*read]


def _build(spec: ModelSpec, weights: Weights) -> Decoder:
    with ShapesOnly():
        return Decoder(spec, weights)


def meta_cuts(spec: ModelSpec, rank: Rank) -> Cuts:
    """What a rank keeps of each tensor, without the other ranks."""
    return Cuts.for_rank(Alone(rank), lambda other: divide_model(spec, other)[1])


def meta_target(spec: ModelSpec) -> Target:
    """A target for a model without numbers."""
    target = Target(torch.device("meta"), torch.float32, spec.max_len, spec.hidden_size, ops="reference")
    target.merge_ids = lambda wanted: torch.empty(wanted.tokens, dtype=torch.int64, device="meta")
    return target


def model_states(
    resolved: Resolved, checkpoint: Checkpoint, kv_dtype: str = "model", state_dtype: str = "float32"
) -> Mapping[str, State]:
    """The state of every mixer, by mixer name; `kv_dtype`: of keys, values and latents.

    `state_dtype`: of recurrent state.

    Raises MissingTensor, ShapeMismatch.
    """
    target = meta_target(resolved.spec)
    target.kv_dtype, target.state_dtype = kv_dtype, state_dtype
    return _build(resolved.spec, Weights(Outline(checkpoint), resolved.names, target)).states


def check_rounded_state(resolved: Resolved, checkpoint: Checkpoint, target: Target) -> None:
    """Raises ConfigError if recurrent state is to be rounded and the model has none that can be."""
    if target.state_dtype == "float32":
        return
    states = model_states(resolved, checkpoint, state_dtype=target.state_dtype).values()
    slots = [state for state in states if isinstance(state, SlotState)]
    if any(dtype == target.state_dtype for state in slots for _, dtype in state.tensors.values()):
        return
    has = "what there is keeps its own dtype" if slots else "it has no recurrent state"
    raise ConfigError(
        f"state_dtype: {target.state_dtype} is for recurrent state, and of this model {has}; leave it out"
    )


def rank_share(resolved: Resolved, checkpoint: Checkpoint, rank: Rank) -> tuple[float, list[State]]:
    """(the share of the model's numbers that one rank keeps, the states of its mixers).

    Raises CannotDivide, MissingTensor, ShapeMismatch.
    """
    whole = meta_target(resolved.spec)
    _build(resolved.spec, Weights(Outline(checkpoint), resolved.names, whole))
    target = meta_target(resolved.spec)
    target.cuts = meta_cuts(resolved.spec, rank)
    part = divide_model(resolved.spec, rank)[0]
    made = _build(part, Weights(Outline(checkpoint), resolved.names, target))
    return target.weights_nbytes / whole.weights_nbytes, list(made.states.values())
