"""A residual branch of a decoder, and norms between two of them that their linear layers compute.

Between branches that are folded, a norm is no launch of its own on a GPU: the last linear layer of one and
the first of the next compute it (`ops.folded_norm`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.shared_weights import SharedWeights
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, CanvasRows, Norm
from plait.model.mixers.registry import build
from plait.model.shared_block import SharedBlockUse
from plait.ops.activation import combine, rescale, scale_rows
from plait.ops.folded_norm import MOST_ROWS, HalfNorm, LinearEnds, add_linear, norm_glu, norm_linear
from plait.ops.linear import Linear
from plait.ops.ranks import sum_ranks
from plait.ops.registry import Bound, Op
from plait.spec.model import BranchSpec
from plait.state.store import StateStore


class Branch:
    """One residual addition: x += scale * post_norm(mixer(norm(x))); what stays may be keep * norm(x).

    An *aside*, a block that branches share, reads x and the embeddings. Only the norm sees its output.
    """

    def __init__(self, s: BranchSpec, w: Weights, hidden_size: int) -> None:
        w, self.scale, self.keep = SharedWeights.of(w, s.source), s.scale, s.keep
        self.norm = Norm(s.norm, w.scope("norm"), hidden_size) if s.norm else None
        self.mixer = build(s.mixer, w)
        self._ends = read_ends(self.mixer)
        self._fold_in: Fold | None = None  # the norm that this branch begins with, if it is folded
        self._fold_out: Fold | None = None
        self.aside = SharedBlockUse(s.aside, w.scope("aside")) if s.aside else None
        self.states: dict[str, State] = {**self.mixer.states, **(self.aside.states if self.aside else {})}
        self.post_norm = Norm(s.post_norm, w.scope("post_norm"), hidden_size) if s.post_norm else None
        self._combine, self._rescale = w.bind(combine), w.bind(rescale)
        self._ranks = None if getattr(self.mixer, "is_summed", False) else (w.target.comm, w.target.dtype)
        self.factor = w.tensor("factor", (1,), torch.float32) if s.factor else None
        has_own = s.factor == "canvas"
        self._canvas_factor = w.tensor("canvas_factor", (1,), torch.float32) if has_own else None
        self._scale_rows = w.bind(scale_rows) if s.factor else None

    def enter(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what the last branch gave, and norm it: (x that stays, h), both [T, hidden]."""
        if self.norm:
            x, h = self.norm.add(x, delta)
        else:
            h = x = x if delta is None else self._combine(x, delta, 1.0)
        return self._residual(x, h), h

    def enter_beside(
        self, x: Tensor, delta: Tensor | None, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor]:
        """`enter` with an aside, of which the output is added to what is normed: (x that stays, h)."""
        if self.aside is None:
            return self.enter(x, delta)
        x = x if delta is None else self._combine(x, delta, 1.0)
        seen = self.aside(x, embeddings, batch, store)
        h = self.norm.add(x, seen)[1] if self.norm else self._combine(x, seen, 1.0)
        return self._residual(x, h), h

    def _residual(self, x: Tensor, h: Tensor) -> Tensor:
        if self.keep is None:
            return x
        return h if self.keep == 1.0 else self._rescale(h, self.keep, None)

    def leave(
        self, x: Tensor, delta: Tensor, canvas: CanvasRows | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, what is to be added to it): both in one, times the factor, if there is one."""
        if self.factor is None or self._scale_rows is None:
            return x, delta
        by = self.factor.expand(len(x), 1)
        if canvas and self._canvas_factor is not None:
            by = torch.where(canvas.is_place[:, None], self._canvas_factor, by)
        return self._scale_rows(self._combine(x, delta, 1.0), by), None

    def fold_into(self, w: Weights, following: Branch, after: Weights) -> None:
        """Let linear layers compute the norm between this branch and the one that follows, if they can.

        w, after: the weights of both.
        """
        is_plain = self.post_norm is None and self.factor is None
        if is_plain and following.aside is None and following.keep is None:
            here = Ends(self._ends, self.scale, self.norm, w)
            behind = Ends(following._ends, following.scale, following.norm, after)
            self._fold_out = following._fold_in = fold_norm(here, behind)

    def run(
        self, x: Tensor, delta: Tensor | HalfNorm | None, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor | HalfNorm | None]:
        """(x, what is to be added to it), given what the branch before returned.

        Of 1 to 16 rows it is x with this branch added, and half of its norm, where that is folded.
        """
        if isinstance(delta, HalfNorm):
            assert self._fold_in
            first = self._fold_in.begin(delta)
        else:
            x, h = self.enter_beside(x, delta, embeddings, batch, store)
            if self._fold_out is None or len(x) > MOST_ROWS:
                return self.leave(x, self(h, batch, store), batch.canvas)
            first = self.mixer.begin(h)  # type: ignore[attr-defined]
        h = self.mixer.middle(first, batch, store)  # type: ignore[attr-defined]
        if self._fold_out:
            return self._fold_out.end(h, x)
        return self.leave(x, self._finish(self._ends.last(h) if self._ends.last else h), batch.canvas)

    def __call__(self, h: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """What is to be added to x, [T, hidden]."""
        return self._finish(self.mixer(h, batch, store))

    def _finish(self, h: Tensor) -> Tensor:
        """What the mixer gives, as it is added."""
        h = sum_ranks(h, *self._ranks) if self._ranks else h
        h = self.post_norm(h) if self.post_norm else h
        return h if self.scale == 1.0 else self._rescale(h, self.scale, None)


class Ends(NamedTuple):
    """What a branch says of itself. scale: of what it adds; norm: its own, that it begins with."""

    linear: LinearEnds
    scale: float
    norm: Norm | None
    weights: Weights


class Fold:
    """The end of one branch, the norm of the next, and that one's beginning, in two launches."""

    def __init__(self, add: Bound, multiply: Bound, before: Ends, after: Ends) -> None:
        assert after.norm
        self._add, self._multiply = add, multiply
        self._last, self._scale = before.linear.last, before.scale
        self._first, self._kind = after.linear.first, after.linear.kind
        self._weight, self._eps = after.norm.weight, after.norm.eps

    def end(self, h: Tensor, x: Tensor) -> tuple[Tensor, HalfNorm]:
        """h: what the last linear layer is given, [T, in], x: [T, hidden] -> (x that stays, its norm)."""
        x, *half = self._add(h, self._last, x, self._scale, self._weight)
        return x, HalfNorm(*half)

    def begin(self, half: HalfNorm) -> Tensor:
        """What the first linear layer of the next branch gives, [T, out]."""
        made: Tensor = self._multiply(*half, self._first, self._eps, *([self._kind] if self._kind else []))
        return made


def read_ends(mixer: object) -> LinearEnds:
    """The ends of a mixer of which the class itself has `ends`: a subclass may begin or end otherwise."""
    if "ends" not in vars(type(mixer)):
        return LinearEnds(None, "", None)
    found: LinearEnds = mixer.ends()  # type: ignore[attr-defined]
    return found


def fold_norm(before: Ends, after: Ends) -> Fold | None:
    """The fold between two branches; None where the norm stays a launch of its own."""
    first, last, norm = after.linear.first, before.linear.last, after.norm
    target = after.weights.target
    if target.platform != "cuda" or target.adapters or target.comm.rank.size > 1:
        return None
    if not (isinstance(first, Linear) and isinstance(last, Linear)) or norm is None or not norm.is_plain:
        return None
    add = _bind_kernel(add_linear, before.weights, last, hidden=last.n_out)
    if add is None:
        return None
    kind = after.linear.kind
    fused, sizes = (norm_glu, {"kind": kind}) if kind else (norm_linear, {})
    multiply = _bind_kernel(fused, after.weights, first, hidden=first.n_in, **sizes)
    if multiply is None:
        _forget(before.weights, add_linear)
        return None
    return Fold(add, multiply, before, after)


def _bind_kernel(op: Op, w: Weights, layer: Linear, **sizes: object) -> Bound | None:
    """The kernel of an op over a linear layer; None where there is none, or `no_fuse` names it."""
    if op.name in w.target.no_fuse:
        return None
    fn = w.bind(op, layer=layer, stored=layer.storages, **sizes)
    if w.target.bound[-1].variant != "reference":
        return fn
    _forget(w, op)
    return None


def _forget(w: Weights, op: Op) -> None:
    """What was bound last is not used after all."""
    row = w.target.bound.pop()
    assert row.op == op.name
