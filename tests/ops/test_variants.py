"""Every registered variant that this machine can run, on every case, against its reference.

A kernel is tested by being registered.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from plait.kernels.load import load_kernels
from plait.model.mixers.registry import list_mixers
from plait.ops.attention import BLOCK
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant
from plait.quant.weight import Dense
from tests.common_storages import DRAWN, is_rare

load_kernels()
list_mixers()  # registers every op that a model can use
importlib.import_module("plait.runner.sampling.sampler")  # and those of the sampler
FORBIDDING = {"edit_logits", "pick_columns", "scatter_logits"}  # what returns -inf on purpose
STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}  # what every mixer adds to an op's own sizes
SLOW = "slow"
TOGETHER = 8  # cases of one test: for most of them, a test's own cost is more than theirs


# Whole activations have kernels of their own on some processors, made from the same parts as others.
ROUNDED_ALONE = {"Q4_1", "Q6_K", "int4_g64", "mxfp4"}


def is_slow(op: Op, case: Mapping[str, Any]) -> bool:
    """Whether a native kernel of a case is compiled by `make test-all` alone."""
    storage = case.get("stored", case.get("kind"))
    is_whole = op.name == "linear" and case.get("activations", "float32") == "float32"
    is_seven = case.get("kv_dtype") == "int7"  # tests/kernels/cpu/attention has one of its forms
    return is_rare(storage) or is_seven or (is_whole and storage in ROUNDED_ALONE)


def run_when(op: Op, case: Mapping[str, Any]) -> str:
    """SLOW, the storage of DRAWN that a native kernel is compiled for, or "" for always."""
    if is_slow(op, case):
        return SLOW
    storage = str(case.get("stored", case.get("kind"))).partition("+")[0]
    return storage if storage in DRAWN else ""


def runnable() -> Iterator[Any]:
    """Each variant with some of its op's cases, and their places among them."""
    for op in REGISTRY.values():
        for variant in op.variants:
            if variant.on == "cuda" and not torch.cuda.is_available():
                continue
            groups: defaultdict[str, list[int]] = defaultdict(list)
            for i, case in enumerate(op.cases):
                groups[run_when(op, case) if variant.native else ""].append(i)
            for when, places in groups.items():
                for first in range(0, len(places), TOGETHER):
                    # tests/kernels/cpu/attention has more shapes; each takes a second to compile.
                    is_more = first > 0 and variant.native and op.name == "paged_attention"
                    marks = [pytest.mark.slow] if when == SLOW or is_more else []
                    marks += [pytest.mark.drawn(when, DRAWN)] if when in DRAWN else []
                    some = places[first : first + TOGETHER]
                    name = f"{op.name}-{variant.name}-{some[0]}-{some[-1]}"
                    yield pytest.param(op, variant, some, id=name, marks=marks)


@pytest.mark.sampled(4, each="variant")
@pytest.mark.parametrize(("op", "variant", "places"), list(runnable()))
def test_variant_agrees_with_reference(op: Op, variant: Variant, places: list[int], cpu: Any) -> None:
    for i in places:
        for dtype in op.tolerance:
            check_agreement(op, variant, op.cases[i], dtype, cpu)


def check_agreement(op: Op, variant: Variant, case: Any, dtype: torch.dtype, cpu: Any) -> None:
    facts = OpFacts(variant.on, dtype, {**STANDARD, **case}, cpu)
    if variant.refusal(facts) is not None:
        return  # the variant says itself that it does not serve this case; the reference does
    assert op.make, f"{op.name} has cases but no @{op.name}.inputs"
    torch.default_generator.manual_seed(0)
    args, kwargs = op.make(case, dtype, variant.on)
    wanted, given = copied(args), copied(args)
    want = [*tensors(op.reference(*wanted, **kwargs)), *tensors(shared_state(op, wanted))]
    fn = variant.bind(cpu)
    # State is changed in place: compare it too.
    got = [*tensors(fn(*given, **kwargs)), *tensors(shared_state(op, given))]
    near = op.find_tolerance(variant, dtype)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.float(), b.float(), rtol=near, atol=near, msg=lambda text: f"{case}, {dtype}: {text}"
        )


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_reference_runs_on_its_cases(name: str) -> None:
    op = REGISTRY[name]
    assert op.cases, f"{name} has no cases"
    assert op.make, f"{name} has no @{name}.inputs"
    for case in op.cases:
        args, kwargs = op.make(case, torch.float32, "cpu")
        for out in tensors(op.reference(*args, **kwargs)):
            whole = out[out != -torch.inf] if name in FORBIDDING else out
            assert not out.is_floating_point() or bool(whole.isfinite().all())


def test_the_choice_can_be_read() -> None:
    op = REGISTRY["paged_attention"]
    _, capped = op.bind(OpFacts("cpu", torch.float32, {"softcap": 50.0}), "layers.0.attn")
    assert capped.variant == "reference"
    assert ("sdpa", "torch's attention has no softcap") in capped.skipped
    _, plain = op.bind(OpFacts("cpu", torch.float32, {"softcap": None}), "layers.0.attn")
    assert plain.variant == "sdpa"
    _, asked = op.bind(OpFacts("cpu", torch.float32, {}), "layers.0.attn", choice="reference")
    assert asked.variant == "reference"


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ops that keep state write into their arguments: each side gets its own."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def shared_state(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with content that every variant must agree on afterwards."""
    names = list(inspect.signature(op.reference).parameters)
    return tuple(a for name, a in zip(names, args, strict=False) if name not in op.private)


def tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, Dense):
        return [out.tensor]
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)]
