"""The compiled forms of Triton kernels: what each is compiled with. A machine without a GPU can try them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps

TARGETS = (80, 90, 120)  # compute capabilities: A100, H100 and H200, RTX 5090


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel with its constants, as one step launches it.

    types: of arguments that are no constants. "bf16*" is a pointer that 16 divides, "i32!" an integer that 16
    divides, "i32" any integer; an argument without an entry is an "i32". `demands`: instructions that the
    machine code must have, each a tuple of which one is enough. `max_registers`: of a thread. weights:
    numbers of a weight matrix that a program multiplies in one pass of its longest loop, 0 for other kernels;
    `max_per_weight`: instructions of one lane for each of them.
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


# What follows from other constants (assembly), or is decided by sizes alone: whole steps, shares, rows of a
# scale.
SIZES = frozenset({"CODE", "EVEN", "IS_SPLIT", "BLOCKS", "ZERO", "BASE"})
EXACT = frozenset({"BITS", "HIGH", "VALUE", "SCALES"})  # numbers that decide the code: of planes


def class_of(name: str, value: object) -> object:
    """What of a constant decides which code there is: a flag or a word, and whether a number is 0."""
    if isinstance(value, bool | str) or value is None or name in EXACT:
        return value
    return bool(value)


def with_float32(forms: Callable[[], Iterator[KernelForm]]) -> Callable[[], Iterator[KernelForm]]:
    """Also one form of each kind of kernel with float32 in place of bfloat16, as a float32 model launches it.

    It is for kernels of which no dtype decides the tiles.
    """

    @wraps(forms)
    def both() -> Iterator[KernelForm]:
        seen = set[object]()
        for form in (*forms(), *map(as_float32, forms())):
            kind = _kind_of(form)
            if kind not in seen or not form.name.endswith(FLOAT32):
                yield form
            seen.add(kind)

    return both


FLOAT32 = ", float32"  # behind the name of a form


def as_float32(form: KernelForm) -> KernelForm:
    """A form with float32 in place of bfloat16; there are no matrix units for it."""
    types = {name: "fp32*" if kind == "bf16*" else kind for name, kind in form.types.items()}
    demands = tuple(some for some in form.demands if not {"HMMA", "HGMMA"} & set(some))
    return replace(form, name=form.name + FLOAT32, types=types, demands=demands)


def _kind_of(form: KernelForm) -> tuple[object, ...]:
    """What decides the code of a form, sizes apart."""
    pointers = sorted((name, kind) for name, kind in form.types.items() if kind.endswith("*"))
    classes = sorted((name, str(class_of(name, value))) for name, value in form.constants.items())
    return id(form.kernel), *pointers, *classes


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
