"""Which launches are of a kind that gate C compiles: launches of tiny models against the table of forms.

A tiny model launches a kernel with sizes of its own, so forms are compared by what decides which code there
is: dtypes behind pointers, flags and words, whether a number is 0, and the bits of quantized weights.

Not every combination is compiled, because parts of a kernel do not depend on each other:

* float16 has the tiles of bfloat16. A launch in float16 is compiled if its flags are in bfloat16, and if its
  dtypes and its layout of planes are with any flags.
* What follows the loop of a product (a bias, an activation) is the same behind every layout. A launch is
  compiled if its loop is with any of them, and if what follows is behind any loop of as many products.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

from plait.kernels.load import triton_kernels
from plait.kernels.triton.forms import EPILOGUE, EXACT, SIZES, KernelForm, class_of


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
    forms, launch = list_forms().get(kernel, ()), _Launch(bound, types, constants)
    if exact := next((form for form in forms if launch.has_flags(form) and launch.has_types(form)), None):
        return exact
    loops = {*constants} - EPILOGUE
    has_loop = any(launch.has_flags(form, loops) and launch.has_types(form, is_half=True) for form in forms)
    if not has_loop or not any(launch.has_flags(form, EPILOGUE | {"GATED"}) for form in forms):
        return None
    return next((form for form in forms if launch.has_flags(form, EXACT) and launch.has_types(form)), None)


class _Launch(NamedTuple):
    """The arguments of `find_form`."""

    bound: Mapping[str, Any]
    types: Mapping[str, str]
    constants: Mapping[str, Any]

    def has_flags(self, form: KernelForm, names: Set[str] | None = None) -> bool:
        """Whether constants that are no sizes, all or those of these names, are of the form's classes."""
        return all(
            class_of(name, form.constants[name]) == class_of(name, value)
            for name, value in self.constants.items()
            if name in form.constants and name not in SIZES and (names is None or name in names)
        )

    def has_types(self, form: KernelForm, is_half: bool = False) -> bool:
        """Whether pointers are of the form's dtypes; is_half: float16 is one of them where bfloat16 is."""
        groups = _aliases(self.bound, self.types)
        return all(
            any(_has_type(form, name, self.types[name], is_half) for name in group) for group in groups
        )


def _has_type(form: KernelForm, name: str, kind: str, is_half: bool) -> bool:
    given = {"u1": "i1"}.get(kind.removeprefix("*"), kind.removeprefix("*"))
    compiled = form.types.get(name, "i32").rstrip("*!")
    return compiled == given or (is_half and (compiled, given) == ("bf16", "fp16"))


def _aliases(bound: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[list[str]]:
    """Names of pointers to one tensor: for what is not there, and not read, another argument is given."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, kind in types.items():
        if kind.startswith("*"):
            groups[id(bound[name])].append(name)
    yield from groups.values()
