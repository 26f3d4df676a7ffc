"""Weights that several branches of a model use: read and packed once, as those of the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.expert_stack import ExpertStack, Pack
from plait.ops.linear import Linear
from plait.partition import Range
from plait.quant.weight import Weight

T = TypeVar("T")


class SharedWeights(Weights):
    """A view of a prefix of our names with the tensors of another one, `origin`.

    States and bound ops have the view's own prefix. What is made of tensors is made for the first view of an
    origin, and given to all of them.
    """

    _origin: str
    _base: Weights  # a view that shares nothing

    @classmethod
    def of(cls, w: Weights, origin: str) -> Weights:
        """`w`, its tensors those below `origin`, a name from the root; without one `w` itself."""
        if not origin:
            return w
        base = w._base if isinstance(w, SharedWeights) else w
        made = object.__new__(_with_sharing(type(base)))
        made.__dict__ |= vars(base._view(w.prefix, w.cuts))
        made._origin, made._base = origin, base
        return made

    def scope(self, name: str) -> Weights:
        return self.of(self._plain(f"{self.prefix}.{name}"), self._full(name))

    def shared(self, name: str, build: Callable[[Weights], T]) -> T:
        made: T = self._plain(self.prefix).shared(name, build)
        return made

    def for_share(self, share: int) -> Weights:
        return self.of(self._plain(self.prefix).for_share(share), self._origin)

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found: Tensor = self._once(
            ("tensor", name, dtype), lambda: super(SharedWeights, self).tensor(name, shape, dtype)
        )
        return found

    def stored(self, name: str, shape: tuple[int, int]) -> Tensor | Weight:
        found: Tensor | Weight = self._once(
            ("stored", name), lambda: super(SharedWeights, self).stored(name, shape)
        )
        return found

    def linear(
        self, *names: str, in_size: int, out_sizes: tuple[int, ...], rows: Range | None = None
    ) -> Linear:
        def build() -> Linear:
            return super(SharedWeights, self).linear(*names, in_size=in_size, out_sizes=out_sizes, rows=rows)

        found: Linear = self._once(("linear", *names, rows), build)
        return found

    def linear_stack(
        self, numbers: Sequence[int], *names: str, in_size: int, out_sizes: tuple[int, ...], pack: Pack
    ) -> ExpertStack:
        def build() -> ExpertStack:
            make = super(SharedWeights, self).linear_stack
            return make(numbers, *names, in_size=in_size, out_sizes=out_sizes, pack=pack)

        found: ExpertStack = self._once(("stack", *numbers, *names), build)
        return found

    def _once(self, key: tuple[Hashable, ...], build: Callable[[], T]) -> T:
        """What is made of tensors below the origin, the same for all views of it."""
        whole = f"{self._origin} {self.cuts.first_share} {key}"
        if whole not in self._made:
            self._made[whole] = build()
        return cast(T, self._made[whole])

    def _plain(self, prefix: str) -> Weights:
        return self._base._view(prefix, self.cuts)

    def _full(self, name: str) -> str:
        return f"{self._origin}.{name}"


_KINDS: dict[type[Weights], type[SharedWeights]] = {}


def _with_sharing(kind: type[Weights]) -> type[SharedWeights]:
    """SharedWeights of views that read otherwise than plain ones."""
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Shared{kind.__name__}", (SharedWeights, kind), {})
    return _KINDS[kind]
