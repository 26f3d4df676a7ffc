"""How the shapes of an oxidizr checkpoint are read: one kind of branch at a time, beside the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plait.errors import MissingTensor, ShapeMismatch
from plait.families.oxidizr.config import OxidizrFacts
from plait.families.oxidizr.names import Catalog
from plait.spec.model import Mixer, NormSpec
from plait.spec.positions import RopeSpec

Shape = tuple[int, ...]
Tensors = dict[str, tuple[Shape, bool]]  # leaf -> (shape, whether it must be there)
SsmMode = Literal["ssd", "exact"]


@dataclass(frozen=True, slots=True)
class BranchPart:
    """A branch's mixer and norm, and the tensors it is made of."""

    mixer: Mixer
    norm: NormSpec
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class View:
    """One kind of branch in a checkpoint: `prefixes` are its places, like `layers.3.ssm`, in order."""

    facts: OxidizrFacts
    catalog: Catalog
    shapes: Mapping[str, Shape]  # by our names
    prefixes: tuple[str, ...]
    hidden: int
    ssm_mode: SsmMode

    def __contains__(self, leaf: str) -> bool:
        return any(f"{p}.{leaf}" in self.shapes for p in self.prefixes)

    def ours(self, leaf: str) -> str:
        """The place that is measured: the first that has the leaf."""
        full = [f"{p}.{leaf}" for p in self.prefixes]
        return next((name for name in full if name in self.shapes), full[0])

    def theirs(self, leaf: str) -> str:
        return self.catalog.theirs(self.ours(leaf))

    def shape(self, leaf: str, *dims: int) -> Shape:
        """Raises MissingTensor, and ShapeMismatch if it has not one of these numbers of dimensions."""
        found = self.shapes.get(self.ours(leaf))
        if found is None:
            raise MissingTensor(
                f"the checkpoint has no {self.theirs(leaf)!r}, which that layer needs and which shows "
                "its sizes; the file is incomplete: fetch or export it again"
            )
        if len(found) not in dims:
            wanted = " or ".join(map(str, dims))
            raise ShapeMismatch(
                f"{self.theirs(leaf)} has shape {list(found)}; it must have {wanted} dimension(s)"
            )
        return found

    def measure(self, key: str, value: object, leaf: str) -> Any:
        """A value that the tensor at `leaf` decides, checked against the config."""
        shape = self.shapes.get(self.ours(leaf))
        state = "(not there)" if shape is None else str(list(shape))
        return self.facts.tensor(key, value, f"{self.theirs(leaf)} {state}")

    def divide(self, total: int, by: int, leaf: str, what: str) -> int:
        """Raises ShapeMismatch if it does not come out as a whole number."""
        if by < 1 or total < 1 or total % by:
            shape = list(self.shapes[self.ours(leaf)])
            raise ShapeMismatch(
                f"{self.theirs(leaf)} has shape {shape}, so that {what} would be {total} / {by}, which is "
                "not a whole number of at least 1; another tensor or the config is off"
            )
        return total // by

    def rope(self, dim: int) -> RopeSpec:
        theta = self.facts.default("rope_theta", 10_000.0)
        scaling = dict(self.facts.find("rope_scaling") or {})
        if "type" in scaling:
            scaling["rope_type"] = scaling.pop("type")
        return RopeSpec(dim, float(theta), scaling, bool(self.facts.find("rope_interleave")))

    def rms(self) -> NormSpec:
        return NormSpec(self.facts.default("rms_norm_eps", 1e-5))


def linear(leaf: str, out: int, into: int, *, bias: bool = False) -> Tensors:
    """A matrix that must be there, and a bias that must (`bias`) or may be."""
    return {f"{leaf}.weight": ((out, into), True), f"{leaf}.bias": ((out,), bias)}
