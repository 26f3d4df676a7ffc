"""The compiled forms of Triton kernels: what each is compiled with. A machine without a GPU can try them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

TARGETS = (80, 90, 120)  # compute capabilities: A100, H100 and H200, RTX 5090


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel with its constants, as one step launches it.

    types: of arguments that are no constants. "bf16*" is a pointer that 16 divides, "i32!" an integer that 16
    divides, "i32" any integer; an argument without an entry is an "i32". `demands`: instructions that the
    machine code must have, each a tuple of which one is enough. `max_registers`: of a thread. weights:
    numbers of a weight matrix that a program multiplies in one pass of its longest loop, 0 for other kernels;
    `max_per_weight`: instructions of one lane for each of them. `shares_rows`: every warp has a part of each
    row in its products, so that sums of a row have the same order in tiles with other rows.
    """

    name: str
    kernel: object
    types: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[int, ...] = TARGETS
    demands: tuple[tuple[str, ...], ...] = ()
    max_registers: int = 255
    options: Mapping[str, object] = field(default_factory=dict)
    weights: int = 0
    max_per_weight: float = 0.0
    shares_rows: bool = False


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constants of a kernel, fields of its `KernelForm`) of what a launch is given by name."""
    fields = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
    options = {name: given[name] for name in ("maxnreg",) if name in given}
    constants = {name: value for name, value in given.items() if name not in fields | options}
    return constants, fields | {"options": options}


# What follows from other constants (assembly), or is decided by sizes alone: whole steps, shares, rows of a
# scale.
SIZES = frozenset({"CODE", "EVEN", "IS_SPLIT", "BLOCKS", "ZERO", "BASE"})
# What follows the loop of a product, whatever the loop decodes.
EPILOGUE = frozenset({"BIAS", "ACT", "KIND"})
EXACT = frozenset({"BITS", "HIGH", "VALUE", "SCALES"})  # numbers that decide the code: of planes


def class_of(name: str, value: object) -> object:
    """What of a constant decides which code there is: a flag or a word, and whether a number is 0."""
    if isinstance(value, bool | str) or value is None or name in EXACT:
        return value
    return bool(value)


Forms = Callable[[], Iterator[KernelForm]]


def with_float32(forms: Forms) -> Forms:
    """Also one form of each kind of kernel with float32 in place of bfloat16, as a float32 model launches it.

    It is for kernels of which no dtype decides the tiles.
    """
    return _with_dtype(forms, as_float32, _kind_of)


def with_float16(forms: Forms) -> Forms:
    """Also one form of each kernel with float16 in place of bfloat16, as a float16 model launches it.

    It has the same tiles: numbers of both are as wide, and the same units multiply them. So there is a form
    for all of a kernel's flags together, and another one only where other pointers are of 16 bits.
    """
    return _with_dtype(forms, as_float16, _types_of)


FLOAT32, FLOAT16 = ", float32", ", float16"  # behind the name of a form
Change = Callable[[KernelForm], KernelForm]
Kind = Callable[[KernelForm], tuple[object, ...]]


def _with_dtype(forms: Forms, change: Change, kind: Kind) -> Forms:
    """What `forms` gives, and of all that `change` makes of it the first of each new kind."""

    @wraps(forms)
    def both() -> Iterator[KernelForm]:
        seen = set[object]()
        for form in forms():
            seen.add(kind(form))
            yield form
        for form in map(change, forms()):
            if kind(form) not in seen:
                yield form
            seen.add(kind(form))

    return both


def as_float32(form: KernelForm) -> KernelForm:
    """A form with float32 in place of bfloat16; there are no matrix units for it."""
    types = {name: "fp32*" if kind == "bf16*" else kind for name, kind in form.types.items()}
    demands = tuple(some for some in form.demands if not {"HMMA", "HGMMA"} & set(some))
    return replace(form, name=form.name + FLOAT32, types=types, demands=demands)


def as_float16(form: KernelForm) -> KernelForm:
    """A form with float16 in place of bfloat16, of a kernel that decodes no codes."""
    named = form.name.replace("bfloat16", "float16")
    return replace(form, name=named if named != form.name else form.name + FLOAT16, types=as_half(form.types))


def as_half(types: Mapping[str, str]) -> dict[str, str]:
    """Types of arguments with float16 in place of bfloat16."""
    return {name: "fp16*" if kind == "bf16*" else kind for name, kind in types.items()}


def _kind_of(form: KernelForm) -> tuple[object, ...]:
    """What decides the code of a form, sizes apart."""
    classes = sorted((name, str(class_of(name, value))) for name, value in form.constants.items())
    return *_types_of(form), *classes


def _types_of(form: KernelForm) -> tuple[object, ...]:
    """A form's kernel, and the types of its pointers."""
    named = inspect.signature(form.kernel.fn).parameters  # type: ignore[attr-defined]
    kinds = ((name, kind) for name, kind in form.types.items() if kind.endswith("*") and name in named)
    return id(form.kernel), *sorted(kinds)


class _Tiles:
    """How tiles are cut in this process: as a GPU has them, or as wide as there are rows."""

    def __init__(self) -> None:
        self.are_wide = False


_tiles = _Tiles()


@contextlib.contextmanager
def wide_tiles() -> Iterator[None]:
    """Inside, tiles of rows with sums of their own are as wide as there are rows, with the same bits.

    Triton's interpreter takes as long for a program of 4 rows as for one of 256. So a step that is run for
    its order and its memory, not for its tiles, takes a sixth of the time.
    """
    _tiles.are_wide = True
    try:
        with _patch_once():
            yield
    finally:
        _tiles.are_wide = False


class _NoScope:
    def restore(self) -> None:
        """Nothing was patched."""


@contextlib.contextmanager
def _patch_once() -> Iterator[None]:
    """Inside, Triton's language is the interpreter's. Else each launch, and each function that a kernel
    calls, patches all of it and takes it back, which is half of a small launch's time."""
    try:
        from triton.runtime import interpreter

        patch_language = interpreter._patch_lang
    except (ImportError, AttributeError):  # another version of Triton
        yield
        return
    kept: dict[str, object] = {}  # by module: what is patched depends on the names that a function sees

    def patch(fn: object) -> _NoScope:
        if fn.__module__ not in kept:
            kept[fn.__module__] = patch_language(fn)
        return _NoScope()

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = patch_language
        for scope in reversed(kept.values()):
            if (restore := getattr(scope, "restore", None)) is not None:
                restore()


def widen(rows: int, count: int, most: int = 256) -> int:
    """Rows of a tile over `count` of them: `rows`, and inside of `wide_tiles` up to `most`."""
    if not _tiles.are_wide:
        return rows
    return max(rows, min(most, 1 << max(count - 1, 1).bit_length()))
