"""Which of an adapter's factors belong to which weight of ours, whatever layout the model's files have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from plait.checkpoint.adapters.adapter_file import AdapterFile, FactorPair
from plait.checkpoint.names import Derived, NameMap, UnknownName, sources_of
from plait.errors import ShapeMismatch, UnsupportedFormat, UnusedTensor, list_some
from plait.ops.low_rank import FactorOrder, LowRankFactors
from plait.quant.weight import as_tensor

_NUMBER = re.compile(r"\d+")
_CLOSE = 1e-4  # how far both ways of applying a recipe may be apart, of numbers of order 1


class AdapterMatch:
    """An adapter seen through a model's names. Every pair must be taken: see `check_all_used`.

    `orders`: by our names, for a model of which the files have another order than those of `names`.
    """

    def __init__(
        self, file: AdapterFile, names: NameMap, orders: Mapping[str, FactorOrder] = MappingProxyType({})
    ) -> None:
        self.file, self._names, self._orders = file, names, orders
        self._used: set[str] = set()
        self._linear: set[str] = set()  # kinds of our names with a recipe that was found to be linear

    @property
    def path(self) -> Path:
        return self.file.path

    def has(self, ours: str) -> bool:
        """Whether the adapter changes this weight of ours (a name without `.weight`)."""
        return any(source in self.file.pairs for source in self._sources(ours))

    def rank_of(self, ours: str) -> int:
        """The rank of the factors of this weight of ours, 0 where the adapter leaves it as it is."""
        there = (source for source in self._sources(ours) if source in self.file.pairs)
        return sum(self.file.pairs[source].rank for source in there)

    def take(self, ours: str) -> LowRankFactors | None:
        """The factors of our weight, in our layout; None: the adapter leaves it as it is.

        Raises ShapeMismatch and UnsupportedFormat.
        """
        found, order = self._take(ours), self._orders.get(ours)
        return found if found is None or order is None else found.in_order(order)

    def _take(self, ours: str) -> LowRankFactors | None:
        """The factors in our layout, with the rows in the order that the names' files have."""
        there = [source for source in self._sources(ours) if source in self.file.pairs]
        if not there:
            return None
        source, fields = self._names.resolve(f"{ours}.weight", self.file.pairs)
        self._used.update(there)
        if isinstance(source, str):
            return _plain(source, self.file.pairs[source])
        if source.is_product:
            changed = [name.format(**fields).removesuffix(".weight") for name in there]
            raise UnsupportedFormat(
                f"{self.file.path}: {list_some(changed, 3)}: this model's files have {ours} as a product of "
                "matrices, and an adapter of one of them cannot be served; merge it by `plait "
                "convert --lora`, or train it without these modules"
            )
        made = [
            LowRankFactors(
                *self._derive(ours, source, fields, name, self.file.pairs[name]), self.file.pairs[name].scale
            )
            for name in there
        ]
        return made[0] if len(made) == 1 else _side_by_side(made)

    def check_all_used(self) -> None:
        """Raises UnusedTensor: a pair that no layer took belongs to another model."""
        left = sorted(set(self.file.pairs) - self._used)
        if left:
            raise UnusedTensor(
                f"{self.file.path}: this model has no linear layer for {len(left)} weight(s) of the adapter: "
                f"{list_some([name.removesuffix('.weight') for name in left], 4)}; it is for another model"
            )

    def _sources(self, ours: str) -> Collection[str]:
        try:
            source, _ = self._names.resolve(f"{ours}.weight", self.file.pairs)
        except UnknownName:
            return ()
        return sources_of(source)

    def _derive(
        self, ours: str, source: Derived, fields: dict[str, str], name: str, pair: FactorPair
    ) -> tuple[Tensor, Tensor]:
        """(down, up) through a recipe that moves or scales rows, of which `name` is one source."""
        place = source.sources.index(name)

        def apply(value: Tensor) -> Tensor:
            values = [value] * len(source.sources)
            for i, other in enumerate(source.sources):
                if i != place:
                    known = self.file.pairs.get(other)
                    if known is None:
                        raise UnsupportedFormat(
                            f"{self.file.path}: {ours} is made of {', '.join(source.sources)}, and the "
                            f"adapter has no factors for {other}"
                        )
                    shape = (*known.up.shape[:-1], value.shape[-1])
                    values[i] = value.new_zeros(shape)
            return as_tensor(source.fn(*values, **fields))

        down, up, turned = pair.down, pair.up, self.file.is_turned
        try:
            if down.ndim == 3:
                down = as_tensor(source.fn(down, **fields))
            made = apply(up.float().T.contiguous() if turned else up.float())
            kind = _NUMBER.sub("#", ours)
            if kind not in self._linear:
                whole = up.float() @ pair.down.float()
                want = apply(whole.T.contiguous() if turned else whole)
                unit = max(float(want.abs().max()), 1e-30)
                if want.shape != (made.shape[0], down.shape[1]) or not torch.allclose(
                    want / unit, made @ down.float() / unit, atol=_CLOSE
                ):
                    raise UnsupportedFormat(
                        f"{self.file.path}: the files of this model keep {ours} in a layout that no adapter "
                        "of it can be given"
                    )
                self._linear.add(kind)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            told = " ".join(str(error).split())[:120]
            raise ShapeMismatch(
                f"{self.file.path}: {name}: lora_A {list(pair.down.shape)} and lora_B {list(pair.up.shape)} "
                f"do not fit this model ({told})"
            ) from error
        return down, made.to(up.dtype)


def _plain(name: str, pair: FactorPair) -> LowRankFactors:
    if pair.down.ndim != 2:
        raise ShapeMismatch(
            f"{name}: lora_A is {list(pair.down.shape)}; this layer is one matrix, not a stack"
        )
    return LowRankFactors(pair.down, pair.up, pair.scale)


def _side_by_side(some: Sequence[LowRankFactors]) -> LowRankFactors:
    """The sum of several changes as one."""
    ups = [one.up.float() * one.scale for one in some]
    return LowRankFactors(torch.cat([one.down.float() for one in some]), torch.cat(ups, 1), 1.0)
