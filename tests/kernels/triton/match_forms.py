"""Which launches are of a kind that gate C compiles: launches of tiny models against the table of forms.

A tiny model launches a kernel with sizes of its own, so forms are compared by what decides which code there
is: dtypes behind pointers, flags and words, whether a number is 0, and the bits of quantized weights.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from plait.kernels.load import triton_kernels
from plait.kernels.triton.forms import SIZES, KernelForm, class_of


@cache
def list_forms() -> Mapping[str, Sequence[KernelForm]]:
    """All forms of each kernel, by its name."""
    found: dict[str, list[KernelForm]] = defaultdict(list)
    for name in triton_kernels():
        module = importlib.import_module(name)
        for form in module.forms() if hasattr(module, "forms") else ():
            found[form.kernel.fn.__name__].append(form)  # type: ignore[attr-defined]
    return found


def name_launch(bound: Mapping[str, Any], types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """A launch's kind as text: dtypes behind pointers, then constants that are no sizes."""
    pointers = [f"{name} {kind[1:]}" for name, kind in types.items() if kind.startswith("*")]
    kept = [f"{name}={class_of(name, value)}" for name, value in constants.items() if name not in SIZES]
    return ", ".join([*pointers, *kept])


def find_form(
    kernel: str, bound: Mapping[str, Any], types: Mapping[str, str], constants: Mapping[str, Any]
) -> KernelForm | None:
    """A form that has this launch's kind; None if gate C compiles none.

    bound: the launch's arguments; types: of its pointers, "*fp32"; constants: of its constant parameters.
    """
    for form in list_forms().get(kernel, ()):
        if _agrees(form, bound, types, constants):
            return form
    return None


def _agrees(
    form: KernelForm, bound: Mapping[str, Any], types: Mapping[str, str], constants: Mapping[str, Any]
) -> bool:
    for name, value in constants.items():
        if name in SIZES or name not in form.constants:
            continue
        if class_of(name, form.constants[name]) != class_of(name, value):
            return False
    return all(any(_has_type(form, name, types[name]) for name in group) for group in _aliases(bound, types))


def _has_type(form: KernelForm, name: str, kind: str) -> bool:
    given = {"u1": "i1"}.get(kind.removeprefix("*"), kind.removeprefix("*"))
    return form.types.get(name, "i32").rstrip("*!") == given


def _aliases(bound: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[list[str]]:
    """Names of pointers to one tensor: for what is not there, and not read, another argument is given."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, kind in types.items():
        if kind.startswith("*"):
            groups[id(bound[name])].append(name)
    yield from groups.values()
