"""A residual branch of a decoder, and on GPUs the norms between two of them in fewer launches.

Where branches are folded, a norm is no launch of its own: the last linear layer of one and the first of the
next compute it (`ops.folded_norm`). Where they are joined, the norm behind one and that in front of the next
are one launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.shared_weights import SharedWeights
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, CanvasRows, Norm
from plait.model.mixers.registry import LinearEnds, build
from plait.model.shared_block import SharedBlockUse
from plait.ops.activation import combine, rescale, scale_rows
from plait.ops.expert_stack import ExpertStack
from plait.ops.folded_experts import ExpertsLast, Routed, RouterFirst, add_experts, norm_route
from plait.ops.folded_norm import MOST_ROWS, HalfNorm, add_linear, norm_glu, norm_linear
from plait.ops.linear import Linear
from plait.ops.norm import norm_add, norm_add_norm
from plait.ops.ranks import sum_ranks
from plait.ops.registry import Bound, Op
from plait.spec.model import BranchSpec
from plait.state.store import StateStore


class Unnormed(NamedTuple):
    """What a branch gives before the norm behind it, [T, hidden]: the next branch computes that, too."""

    rows: Tensor


Delta = Tensor | HalfNorm | Unnormed | None


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
        self._join: JoinedNorms | None = None  # with the branch before, which leaves its norm to this one
        self._leaves_norm = False
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

        Where this one ends with a norm, let the one that follows compute both.

        w, after: the weights of both.
        """
        if self.factor is not None or following.aside is not None or following.keep is not None:
            return
        if self.post_norm is None:
            here = Ends(self._ends, self.scale, self.norm, w)
            behind = Ends(following._ends, following.scale, following.norm, after)
            self._fold_out = following._fold_in = fold_norm(here, behind)
        elif self.scale == 1.0:
            following._join = join_norms(self.post_norm, following.norm, after)
            self._leaves_norm = following._join is not None

    def run(
        self, x: Tensor, delta: Delta, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Delta]:
        """(x, what is to be added to it), given what the branch before returned.

        Of 1 to 16 rows it is x with this branch added, and half of its norm, where that is folded.
        """
        if isinstance(delta, HalfNorm):
            assert self._fold_in
            first = self._fold_in.begin(delta)
        else:
            if isinstance(delta, Unnormed):
                assert self._join
                x, h = self._join(x, delta)
            else:
                x, h = self.enter_beside(x, delta, embeddings, batch, store)
            if self._fold_out is None or len(x) > MOST_ROWS:
                return self._end(x, self.mixer(h, batch, store), batch)
            first = self.mixer.begin(h)  # type: ignore[attr-defined]
        h = self.mixer.middle(first, batch, store)  # type: ignore[attr-defined]
        if self._fold_out:
            return self._fold_out.end(h, x)
        return self._end(x, self._ends.last(h) if self._ends.last else h, batch)

    def _end(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Delta]:
        """As `run`, given what the mixer gives."""
        if self._leaves_norm:
            return x, Unnormed(self._sum(h))
        return self.leave(x, self._finish(self._sum(h)), batch.canvas)

    def __call__(self, h: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """What is to be added to x, [T, hidden]."""
        return self._finish(self._sum(self.mixer(h, batch, store)))

    def _sum(self, h: Tensor) -> Tensor:
        return sum_ranks(h, *self._ranks) if self._ranks else h

    def _finish(self, h: Tensor) -> Tensor:
        """What the mixer gives, as it is added."""
        h = self.post_norm(h) if self.post_norm else h
        return h if self.scale == 1.0 else self._rescale(h, self.scale, None)


class Ends(NamedTuple):
    """What a branch says of itself. scale: of what it adds; norm: its own, that it begins with."""

    linear: LinearEnds
    scale: float
    norm: Norm | None
    weights: Weights


class Fold(NamedTuple):
    """The end of one branch, the norm of the next, and that one's beginning.

    add: (what the last layer is given, x [T, hidden], scale, the norm's weight) -> (x that stays, rows,
    squares); multiply: (rows, squares, eps) -> what the next mixer's `begin` gives.
    """

    add: Bound
    multiply: Bound
    scale: float
    norm: Norm

    def end(self, h: object, x: Tensor) -> tuple[Tensor, HalfNorm]:
        """h: what the last layer is given, x: [T, hidden] -> (x that stays, its norm)."""
        x, *half = self.add(h, x, self.scale, self.norm.weight)
        return x, HalfNorm(*half)

    def begin(self, half: HalfNorm) -> object:
        """What the beginning of the next mixer gives."""
        return self.multiply(*half, self.norm.eps)


class JoinedNorms(NamedTuple):
    """The norm behind one branch, the sum, and the norm that the next begins with, if any: one launch."""

    run: Bound
    before: Norm
    after: Norm | None

    def __call__(self, x: Tensor, delta: Unnormed) -> tuple[Tensor, Tensor]:
        """As `Branch.enter`: (x that stays, h), both [T, hidden]."""
        how = self.before.weight, self.before.eps
        if self.after is None:
            x = self.run(x, delta.rows, *how)
            return x, x
        x, h = self.run(x, delta.rows, *how, self.after.weight, self.after.eps)
        return x, h


def join_norms(before: Norm, after: Norm | None, w: Weights) -> JoinedNorms | None:
    """The join of two branches; None where they have other norms, or it has no kernel. w: of the second."""
    if not before.is_plain or (after and not after.is_plain):
        return None
    run = _bind_kernel(norm_add_norm if after else norm_add, w, size=w.target.hidden_size)
    return run and JoinedNorms(run, before, after)


def read_ends(mixer: object) -> LinearEnds:
    """The ends of a mixer of which the class itself has `ends`: a subclass may begin or end otherwise."""
    if "ends" not in vars(type(mixer)):
        return LinearEnds(None, "", None)
    found: LinearEnds = mixer.ends()  # type: ignore[attr-defined]
    return found


def fold_norm(before: Ends, after: Ends) -> Fold | None:
    """The fold between two branches; None where the norm stays a launch of its own."""
    norm, target = after.norm, after.weights.target
    # On "meta" nothing is folded either; but what is bound there is what a GPU tries before it binds it.
    if target.platform not in ("cuda", "meta") or target.adapters or target.comm.rank.size > 1:
        return None
    if norm is None or not norm.is_plain:
        return None
    known = len(target.bound)
    add = _bind_last(before.linear.last, before.weights)
    multiply = _bind_first(after.linear, after.weights)
    if add is None or multiply is None:
        del target.bound[known:]  # what was bound is not used after all
        return None
    return Fold(add, multiply, before.scale, norm)


def _bind_last(last: Linear | ExpertsLast | None, w: Weights) -> Bound | None:
    """What ends a branch and begins a norm; None where it has no kernel."""
    hidden = w.target.hidden_size
    if isinstance(last, Linear):
        add = _bind_kernel(add_linear, w, layer=last, stored=last.storages, hidden=hidden)
        return add and (lambda h, x, scale, weight: add(h, last, x, scale, weight))
    if not isinstance(last, ExpertsLast):
        return None
    run = _bind_kernel(add_experts, w, **last.sizes, hidden=hidden)
    if run is None or not isinstance(last.up, ExpertStack):
        return None  # experts are no stacks where a trial found their own kernel wrong
    return lambda chosen, x, scale, weight: run(*last.join(chosen), x, scale, weight)


def _bind_first(ends: LinearEnds, w: Weights) -> Bound | None:
    """What ends a norm and begins a branch; None where it has no kernel."""
    first, kind = ends.first, ends.kind
    layer = first.layer if isinstance(first, RouterFirst) else first
    if not isinstance(layer, Linear):  # nothing, or one that is divided into shares
        return None
    sizes: dict[str, object] = {"layer": layer, "stored": layer.storages, "hidden": layer.n_in}
    if kind:
        join = _bind_kernel(norm_glu, w, **sizes, kind=kind)
        return join and (lambda rows, squares, eps: join(rows, squares, layer, eps, kind))
    multiply = _bind_kernel(norm_linear, w, **sizes)
    if not isinstance(first, RouterFirst):
        return multiply and (lambda rows, squares, eps: multiply(rows, squares, layer, eps))
    scored = {"num_experts": layer.n_out, "top_k": first.top_k, "router": first.router}
    choose = _bind_kernel(norm_route, w, **scored)
    if multiply is None or choose is None:
        return None

    def route(rows: Tensor, squares: Tensor, eps: float) -> Routed:
        logits = multiply(rows, squares, layer, eps)
        return Routed(*choose(rows, squares, eps, logits, *first.rest))

    return route


def _bind_kernel(op: Op, w: Weights, **sizes: object) -> Bound | None:
    """The kernel of an op; None where there is none, or `no_fuse` names it."""
    if op.name in w.target.no_fuse:
        return None
    fn = w.bind(op, **sizes)
    if w.target.bound[-1].variant == "reference":
        w.target.bound.pop()  # it is not used
        return None
    return fn
