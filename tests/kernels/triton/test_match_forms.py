"""Which launches count as compiled: what is the same code, and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from inspect import signature
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.load import triton_kernels
from plait.kernels.triton.forms import KernelForm, as_half
from tests.kernels.triton.match_forms import find_form, list_forms


def form_named(kernel: str, name: str) -> KernelForm:
    return next(form for form in list_forms()[kernel] if form.name == name)


def find(form: KernelForm, types: Mapping[str, str] | None = None, **flags: Any) -> KernelForm | None:
    """What is found for a launch of a form with other types or flags."""
    fn = form.kernel.fn  # type: ignore[attr-defined]
    given = {name: kind for name, kind in (types or form.types).items() if name in signature(fn).parameters}
    pointers = {name: f"*{kind[:-1]}" for name, kind in given.items() if kind.endswith("*")}
    return find_form(
        fn.__name__, {name: object() for name in pointers}, pointers, {**form.constants, **flags}
    )


def test_a_form_is_found_for_its_own_launch() -> None:
    for name in ("activate_numbers", "few_planes", "multiply_pairs"):
        form = list_forms()[name][0]
        assert find(form) is form


def test_a_form_stays_what_it_is_while_those_after_it_are_made() -> None:
    """Types that forms share would be those of the last one, and no launch has them."""
    for name in triton_kernels():
        make = getattr(importlib.import_module(name), "forms", tuple)
        for listed, alone in zip(list(make()), make(), strict=True):
            assert listed == alone


def test_biases_of_distances_are_found_in_the_model_s_dtype() -> None:
    form = form_named("profile_biases", "profile_biases, inkling")
    assert find(form, {**form.types, "mixed": "bf16*"}) is form


def test_float16_has_the_flags_that_bfloat16_has() -> None:
    form = form_named("activate_numbers", "activate_numbers, relu2 without gate")
    found = find(form, as_half(form.types))
    assert found is not None
    assert found.types["x"] == "fp16*"
    assert find(form, as_half(form.types), KIND="of no model") is None


def test_float16_over_planes_needs_their_own_layout() -> None:
    form = form_named("few_planes", "few rows, Q4_K, gate and up")
    half = {**form.types, **dict.fromkeys(("x", "bias", "out"), "fp16*")}
    found = find(form, half)
    assert found is not None
    assert found.constants["SCALES"] == "mins"
    assert find(form, half, VALUE="of no layout") is None
    assert find(form, {**half, "scales": "fp32*"}) is None


def test_what_follows_a_loop_may_be_compiled_behind_another_loop() -> None:
    form = form_named("few_planes", "few rows, Q6_K, 8")
    assert form.constants["ACT"] == ""
    assert find(form, ACT="silu") is not None  # Q4_K has it
    assert find(form, ACT="of no model") is None
    picked = form_named("expert_up", "expert_up, qwen3 30b-a3b, picked")
    assert find(picked, KIND="situ") is not None
    assert find(picked, KIND="situ", GATED=False) is None  # it has two arguments
