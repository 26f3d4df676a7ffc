"""Which trials a model needs: each GPU kernel, over weights that are stored as the model's are.

The cases of an op are of some storages. For another one, and for the activation of a model's experts, a case
is changed: it has the same sizes, and its weight is stored otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait.loading.kernel_trials.attempts import KernelTrial, TrialCase
from plait.ops.attention import BLOCK
from plait.ops.blocks import is_storage
from plait.ops.chip import Chip
from plait.ops.registry import OURS, REGISTRY, Op, OpFacts, Variant, trial_keys
from plait.ops.rows import FLOATS

STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}  # what every mixer adds to an op's own sizes
TEMPLATE = "Q4_K"  # its cases serve for other storages: whole blocks of each fit their sizes
UNNAMED = ("", "+zeros+order")  # what integers in groups may have besides, of which their format says nothing
OpKinds = Mapping[str, Collection[str]]  # op -> the activations that a model binds it for


@dataclass(frozen=True, slots=True)
class TrialNeeds:
    """What a model may bind kernels for. dtypes: that it computes in, its own first; formats: its weights'.

    deterministic: as it is built, because that decides which variants serve; used: its ops, None: any.
    """

    chip: Chip
    dtypes: Sequence[torch.dtype]
    formats: Collection[str]
    deterministic: bool = False
    used: OpKinds | None = None


def plan_trials(needs: TrialNeeds, modules: Sequence[str] = ()) -> list[KernelTrial]:
    """The trials of every registered GPU kernel of ours that serves the chip: one for each of `trial_keys`.

    Of cases that differ in sizes alone the first and the last are tried: most ops have one row in the first,
    and many in the last. `modules`: others with variants.
    """
    places = (OURS, *(f"{name}." for name in modules))
    found = dict[str, list[KernelTrial]]()
    for op in REGISTRY.values():
        if op.make is None or (needs.used is not None and op.name not in needs.used):
            continue
        for case in _list_cases(op, needs):
            for variant in op.variants:
                if variant.on == "cuda" and f"{variant.module}.".startswith(places):
                    for trial in _list_trials(op, variant, case, needs):
                        found.setdefault(trial.key, []).append(trial)
    return [_join(trials) for trials in found.values()]


def _join(trials: Sequence[KernelTrial]) -> KernelTrial:
    """One trial of the first and the last case of each storage."""
    ends: dict[tuple[tuple[str, str], ...], tuple[TrialCase, TrialCase]] = {}
    for trial in trials:
        for case in trial.cases:
            first, _ = ends.get(case.changes, (case, case))
            ends[case.changes] = first, case
    return replace(trials[0], cases=tuple(dict.fromkeys(case for both in ends.values() for case in both)))


def _list_cases(op: Op, needs: TrialNeeds) -> Iterator[TrialCase]:
    """Cases of plain numbers, and those of the storages that the model has."""
    plain, stored = dict[str, list[int]](), dict[str, list[int]]()
    for i, case in enumerate(op.cases):
        storage = _storage_of(case)
        some, name = (stored, storage) if storage else (plain, str(case.get("kind", "")))
        some.setdefault(name, []).append(i)
    kinds: Collection[str] = ()
    if any("stored" in case for case in op.cases):
        kinds = plain if needs.used is None else sorted(needs.used[op.name]) or [""]
        usual = next(iter(plain.values()))
        yield from (TrialCase(i, _say_kind(kind)) for kind in kinds for i in usual)
        plain = {kind: plain.get(kind, []) for kind in kinds}
    yield from (TrialCase(i) for some in plain.values() for i in some)
    for storage in sorted(set(needs.formats)) if stored else ():
        if storage in stored or is_storage(storage):
            yield from _list_stored(op, storage, stored, kinds)


def _list_stored(
    op: Op, storage: str, stored: Mapping[str, Sequence[int]], kinds: Collection[str]
) -> Iterator[TrialCase]:
    """Cases of one storage, each for all `kinds`: the op's own if there are several, or the template's.

    Of integers in groups the template's in all forms, because their own cases have one form each.
    """
    is_grouped = storage.startswith("int")
    own = () if is_grouped else stored.get(storage, ())
    for i in own if len(own) > 1 else stored[TEMPLATE]:
        for more in UNNAMED if is_grouped else ("",):
            if "stored" in op.cases[i]:
                yield from (TrialCase(i, (("stored", storage + more), *_say_kind(kind))) for kind in kinds)
            else:
                yield TrialCase(i, (("kind", storage), ("more", more)))


def _say_kind(kind: str) -> tuple[tuple[str, str], ...]:
    return (("kind", kind),) if kind else ()


def _storage_of(case: Mapping[str, object]) -> str | None:
    """What a case's weight is stored as; None: plain numbers in the dtype of a trial."""
    name = str(case.get("stored") or case.get("kind") or "").partition("+")[0]
    return name if name in FLOATS or is_storage(name) else None


def _list_trials(op: Op, variant: Variant, case: TrialCase, needs: TrialNeeds) -> Iterator[KernelTrial]:
    sizes = case.apply(op.cases)
    # Layers with stored weights compute in the model's dtype; others, as the sampler, in float32, too.
    for dtype in needs.dtypes[:1] if _storage_of(sizes) else needs.dtypes:
        standard = {**STANDARD, "deterministic": needs.deterministic}
        facts = OpFacts("cuda", dtype, {**standard, **sizes}, chip=needs.chip)
        if dtype in op.tolerance and variant.refusal(facts) is None:
            name = str(dtype).removeprefix("torch.")
            for key in trial_keys(op.name, variant.name, facts):
                yield KernelTrial(key, op.name, variant.name, name, (case,))
