"""Mixers by the class of their spec: what builds one, and what `plait info` says of it.

A module of this folder registers its mixer itself, and so does a plug-in: there is no list of them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CannotDivide, UnsupportedModel
from plait.memory import State, has_slots
from plait.model.layers.layers import Batch
from plait.ops.folded_experts import ExpertsLast, RouterFirst
from plait.ops.linear import Linear
from plait.partition import Division, Rank
from plait.spec.model import Mixer, ParallelSpec, Recurrent
from plait.state.store import StateStore

S = TypeVar("S", bound=Mixer)
INNER = "inner"  # the mixer inside another one


class MixerModule(Protocol):
    """What happens inside a residual branch: a function of (x [T, hidden], batch, store) -> [T, hidden]."""

    states: dict[str, State]

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor: ...


class LinearEnds(NamedTuple):
    """The linear layers with which a mixer begins and ends: nothing else reads its input.

    kind: the activation of gate and up that follows the first one at once, or "". A mixture of experts begins
    with its router and ends with its experts. None: it begins or ends otherwise.
    """

    first: Linear | RouterFirst | None
    kind: str
    last: Linear | ExpertsLast | None


class BetweenLinears:
    """A mixer that begins and ends with a linear layer, of which nothing else reads the input.

    They may compute the norm in front of it and the sum behind it, too (`model.branch`), so a class says by
    itself which they are, and what is between them.
    """

    def ends(self) -> LinearEnds:
        """Its linear layers. One that is None is in `middle`."""
        raise NotImplementedError

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From what `begin` gives, [T, n], to what the last linear layer is given."""
        raise NotImplementedError

    def begin(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> what the first linear layer gives; x itself where there is none."""
        first = self.ends().first
        return x if first is None or isinstance(first, RouterFirst) else first(x)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        h, last = self.middle(self.begin(x), batch, store), self.ends().last
        return h if last is None or isinstance(last, ExpertsLast) else last(h)


M = TypeVar("M", bound=MixerModule)
Divide = Callable[[Any, Rank, int], Division]  # a spec, a rank, the hidden size -> the rank's part


@dataclass(frozen=True, slots=True)
class Entry:
    """What is registered for one class of specs."""

    build: Callable[[Any, Weights], MixerModule]
    describe: Callable[[Any], str]
    divide: Divide | None


_ENTRIES: dict[type[Mixer], Entry] = {}


def mixer(
    kind: type[S], describe: Callable[[S], str] = repr, divide: Divide | None = None
) -> Callable[[type[M]], type[M]]:
    """Register a class as what computes mixers of a spec class: `cls(spec, weights)` builds one.

    describe: one line for `plait info`, in the words of the mixer's paper, with its sizes. divide: a rank's
    part of it; the outputs of all ranks are summed. Without, the mixer runs on one device only. Raises
    ValueError if the spec class has a mixer.
    """

    def register(cls: type[M]) -> type[M]:
        if kind in _ENTRIES:
            raise ValueError(f"mixer {kind.__name__!r} is defined twice")
        _ENTRIES[kind] = Entry(cls, describe, divide)
        return cls

    return register


def list_mixers() -> Mapping[type[Mixer], Entry]:
    """Every mixer of this folder, and those of the plug-ins that were loaded."""
    _import_siblings()
    return _ENTRIES


def build(s: Mixer, w: Weights) -> MixerModule:
    """What computes a mixer, its weights taken from `w`. Raises UnsupportedModel and CheckpointError."""
    made = _entry(s).build(s, w)
    if has_slots(made.states) and not isinstance(s, Recurrent | ParallelSpec):
        raise UnsupportedModel(
            f"mixer {type(s).__name__} has recurrent state, and its spec does not say so: derive it from "
            "plait.spec.model.Recurrent"
        )
    return made


def describe(s: Mixer) -> str:
    """A mixer in one line, with its sizes."""
    return _entry(s).describe(s)


def divide(s: Mixer, rank: Rank, hidden_size: int) -> Division:
    """A rank's part of a mixer. Raises CannotDivide."""
    found = _entry(s).divide
    if found is None:
        raise CannotDivide(f"{type(s).__name__} does not say how it is divided (`divide` of @mixer)")
    return found(s, rank, hidden_size)


def divide_inside(s: ParallelSpec, rank: Rank, hidden_size: int) -> Division:
    """A rank's part of a mixer around another one (`parts[INNER]`), of which all else is whole on every rank.

    What is inside is divided, and its mixer sums it before it goes on.
    """
    if INNER not in s.parts:
        return Division(s, {}, sums=-1)
    inner = divide(s.parts[INNER], rank, hidden_size)
    cuts = {f"{INNER}.{key}": cut for key, cut in inner.cuts.items()}
    return Division(replace(s, parts={INNER: inner.spec}), cuts, inner.sums, inner.gathers)


def _entry(s: Mixer) -> Entry:
    found = list_mixers().get(type(s))
    if found is None:
        raise UnsupportedModel(
            f"no mixer is registered for the spec class {type(s).__name__}; what computes it has to be "
            "decorated with @mixer, in a module that is loaded (--plugin)"
        )
    return found


@cache
def _import_siblings() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
