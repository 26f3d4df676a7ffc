"""Ops and their variants: an op is its reference; a kernel is a variant that must agree with it.

Choice happens once, at construction, from static facts (`OpFacts`), never from data, and can be printed
(`plait info MODEL --ops`). There is no silent fallback: what is bound is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.ops.chip import PRODUCTS, Chip

OURS = "plait.kernels."  # modules of kernels that are tried on a GPU before they are bound
TRITON = "plait.kernels.triton."
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Bound = Callable[..., Any]  # what is bound for an op
TensorFn = Callable[..., Tensor]  # the same, of an op that gives one tensor
F = TypeVar("F", bound=Callable[..., object])
MakeInputs = Callable[[Any, torch.dtype, str], Arguments]  # of a case: its op says of which type


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a choice may depend on: the device type, the dtype, and an op's own static sizes.

    `executor`: what runs native kernels on this device (`kernels.cpu.runtime.executor`), if there is one;
    `chip`: the GPU, if it is one.
    """

    device: str
    dtype: torch.dtype
    sizes: Mapping[str, Any] = field(default_factory=dict)
    executor: Any = None
    chip: Chip | None = None

    def __getitem__(self, name: str) -> Any:
        return self.sizes[name]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an op. `when` returns None if it can serve these facts, else the reason why not.

    A native one runs on an executor, which it gets as its first argument. `tolerance`: its own, where it
    rounds what the op does not. `is_product`: as of its op.
    """

    name: str
    on: str  # device type
    fn: Bound
    when: Callable[[OpFacts], str | None]
    native: bool = False
    tolerance: Mapping[torch.dtype, float] | None = None
    is_product: bool = False

    def refusal(self, facts: OpFacts) -> str | None:
        """Why it cannot serve these facts, or None."""
        if self.on != facts.device:
            return f"runs on {self.on}, not on {facts.device}"
        if self.native and facts.executor is None:
            return "there is no executor of native kernels"
        is_ours = self.is_product and self.module.startswith(TRITON)
        if is_ours and facts.chip and facts.chip.capability < PRODUCTS:
            return f"Triton uses no matrix units of {facts.chip.name}, but from sm_{PRODUCTS} on"
        return self.when(facts)

    @property
    def module(self) -> str:
        """The module of what computes it, be it a function or one that prepares weights first (`Packing`)."""
        return str(getattr(getattr(self.fn, "apply", self.fn), "__module__", ""))

    def bind(self, executor: object) -> Bound:
        """What is called with the op's own arguments."""
        if not self.native:
            return self.fn
        place = self.fn if isinstance(self.fn, type) else getattr(self.fn, "on", None)
        return place(executor) if place else partial(self.fn, executor)


class Bind(Protocol):
    """Binds an op for sizes that stay as they are (`Weights.bind`)."""

    def __call__(self, op: Op, **sizes: object) -> Bound: ...


def bind_reference(op: Op, **sizes: object) -> Bound:
    """`Bind` of the inputs of cases: the op itself."""
    return op


@dataclass(frozen=True, slots=True)
class Binding:
    """What was bound for which module, and why nothing faster was: a row of `plait info --ops`.

    `replaces`: the ops that a fused op computes in one.
    """

    op: str
    variant: str
    user: str
    skipped: tuple[tuple[str, str], ...]  # (variant, reason)
    replaces: tuple[str, ...] = ()


def list_variants(bound: Iterable[Binding]) -> dict[str, str]:
    """What each op runs as: its variants in order, joined by "+"."""
    found: dict[str, set[str]] = {}
    for row in bound:
        found.setdefault(row.op, set()).add(row.variant)
    return {op: "+".join(sorted(variants)) for op, variants in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class Composition:
    """The ops that a fused op replaces, and how they are called one after the other.

    `compute` gets what is bound for each of `parts`, then the fused op's own arguments. `given`: ops that are
    bound in these arguments (a `Linear`). `exact`: native kernels of both give the same bits. `is_default`:
    the parts serve wherever no variant of the fused op does, because they have kernels of their own there.
    """

    parts: tuple[Op, ...]
    given: tuple[Op, ...]
    compute: Callable[..., object]
    exact: bool
    is_default: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in (*self.given, *self.parts))


@dataclass(slots=True)
class Op:
    """A named operation. Calling it runs the reference. `is_product`: it multiplies matrices."""

    name: str
    reference: Bound
    cases: Sequence[Mapping[str, object]]
    tolerance: Mapping[torch.dtype, float]
    private: frozenset[str] = frozenset()  # state with a layout that each variant chooses
    make: MakeInputs | None = None
    variants: list[Variant] = field(default_factory=list)
    composition: Composition | None = None  # of a fused op
    is_product: bool = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.reference(*args, **kwargs)

    def inputs(self, make: MakeInputs) -> MakeInputs:
        """Register how a case becomes arguments: make(case, dtype, device) -> (args, kwargs)."""
        self.make = make
        return make

    def variant(
        self,
        name: str,
        *,
        on: str,
        when: Callable[[OpFacts], str | None] = lambda facts: None,
        native: bool = False,
        tolerance: Mapping[torch.dtype, float] | None = None,
    ) -> Callable[[F], F]:
        """Register a faster way; later ones are tried first. Of a module that runs again the first is kept.

        Raises ConfigError if another module has a variant of this name for the device: it would never run.
        """

        def register(fn: F) -> F:
            new = Variant(name, on, fn, when, native, tolerance, self.is_product)
            there = next((v for v in self.variants if (v.name, v.on) == (name, on)), None)
            if there is None:
                self.variants.insert(0, new)
            elif there.module != new.module:
                raise ConfigError(
                    f"{self.name} on {on}: {new.module} registers {name!r}, a variant of {there.module}; "
                    "give it another name"
                )
            return fn

        return register

    def replaces(
        self, *parts: Op, given: Sequence[Op] = (), exact: bool = False, is_default: bool = False
    ) -> Callable[[F], F]:
        """Name the composition that this fused op replaces; see `Composition`. It is tested against it.

        compute(*parts, *args, **kwargs) -> what the op returns. An op may be a part of itself, called with
        less to do. `--no-fuse` runs the composition instead of the op.
        """

        def register(fn: F) -> F:
            self.composition = Composition(parts, tuple(given), fn, exact, is_default)
            return fn

        return register

    def find_tolerance(self, variant: Variant, dtype: torch.dtype) -> float:
        """How far, absolutely and relatively, a variant may be from the reference."""
        return (variant.tolerance or self.tolerance)[dtype]

    def bind(self, facts: OpFacts, user: str = "", choice: str = "auto") -> tuple[Bound, Binding]:
        """The function to call for these facts, and the row that explains the choice."""
        skipped: list[tuple[str, str]] = []
        for variant in self.variants:
            if choice == "reference":
                skipped.append((variant.name, "--ops reference is set"))
            elif reason := variant.refusal(facts) or why_rejected(self.name, variant, facts):
                skipped.append((variant.name, reason))
            else:
                return variant.bind(facts.executor), self._row(variant.name, user, skipped)
        return self.reference, self._row("reference", user, skipped)

    def bind_parts(
        self, facts: OpFacts, user: str = "", choice: str = "auto", no_fuse: Collection[str] = ()
    ) -> tuple[Callable[..., object], list[Binding]]:
        """As `bind`; of a fused op that `no_fuse` names, its composition, and a row for each part, too.

        So it is for a composition that is the default where no variant serves; where none could, by the
        device, the parts' rows are all there are.
        """
        named = self.name in no_fuse
        if self.composition is None or not (named or self._is_composed(facts, choice)):
            fn, row = self.bind(facts, user, choice)
            return fn, [row]
        here = [v for v in self.variants if v.on == facts.device]
        why = [(v.name, "--no-fuse names it" if named else v.refusal(facts) or "") for v in here]
        rows = [self._row("composition", user, why)] if named or why else []
        bound, rest = [], set(no_fuse) - {self.name}
        for part in self.composition.parts:
            fn, more = part.bind_parts(facts, user, choice, rest)
            bound.append(fn)
            rows += more
        return partial(self.composition.compute, *bound), rows

    def _is_composed(self, facts: OpFacts, choice: str) -> bool:
        """Whether the parts serve because no variant does."""
        default = self.composition is not None and self.composition.is_default
        return default and choice != "reference" and all(v.refusal(facts) for v in self.variants)

    def _row(self, variant: str, user: str, skipped: Sequence[tuple[str, str]]) -> Binding:
        replaces = self.composition.names if self.composition else ()
        return Binding(self.name, variant, user, tuple(skipped), replaces)


def trial_keys(op: str, variant: str, facts: OpFacts) -> list[str]:
    """What trials of a GPU kernel hold for, each: the op, the variant, the kind of its weights, the dtype.

    Where `stored` has formats of weights and `kind` is an activation, it is of both; several kinds of weights
    have a trial each.
    """
    kind, stored = str(facts.sizes.get("kind", "")), facts.sizes.get("stored", ())
    formats = [stored.partition("+")[0]] if isinstance(stored, str) else list(stored)
    kinds = [f"{name}+{kind}" if kind else name for name in formats] or kind.split("+")
    dtype = str(facts.dtype).removeprefix("torch.")
    return ["/".join((op, variant, name, dtype)) for name in kinds]


def why_rejected(op: str, variant: Variant, facts: OpFacts) -> str | None:
    """Why a kernel is not bound that was tried on this GPU, or None: it was right there, or none was tried.

    A kind or dtype that no trial had shares the fate of the variant's others. A kernel of ours without any
    trial, where others had theirs, is not bound: nothing is known of it on this GPU.
    """
    trials = facts.chip.trials if facts.chip else {}
    if not trials:
        return None
    own = [trials.get(key) for key in trial_keys(op, variant.name, facts)]
    others = [why for key, why in trials.items() if key.startswith(f"{op}/{variant.name}/")]
    if not others and variant.module.startswith(OURS):
        return "it was not tried on this GPU"
    why = next(filter(None, [*own, *(others if None in own else ())]), "")
    return f"in its trial on this GPU {why}" if why else None


REGISTRY: dict[str, Op] = {}


def check_fused(names: Sequence[str]) -> None:
    """Raises ConfigError if one of them is no fused op; `no_fuse` takes no other."""
    fused = sorted(name for name, op in REGISTRY.items() if op.composition)
    for name in names:
        if name not in fused:
            what = "is an op, but not a fused one" if name in REGISTRY else "is no op"
            raise ConfigError(f"no_fuse: {name!r} {what}; fused ops are {', '.join(fused)}")


TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def op(
    *,
    cases: Sequence[Mapping[str, object]] = (),
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
    private: Sequence[str] = (),
    is_product: bool = False,
) -> Callable[[Callable[..., object]], Op]:
    """Make a plain torch function the reference of an op.

    `cases`: the sizes that tests try; `tolerance`: absolute, per dtype, outputs being of order 1; `private`:
    arguments that hold state in a layout which only the variant that wrote it can read; `is_product`: it
    multiplies matrices, for which kernels take a GPU's matrix units.
    """

    def register(fn: Callable[..., object]) -> Op:
        name = fn.__name__
        if name in REGISTRY:
            raise ValueError(f"op {name!r} is defined twice")
        REGISTRY[name] = Op(name, fn, tuple(cases), tolerance, frozenset(private), is_product=is_product)
        return REGISTRY[name]

    return register
