"""Which source each compiled form of the GPU kernels is of: a digest, kept in each row of the report.

A digest covers what machine code follows from: the kernel and all that it calls, without comments, docstrings
and layout; the values of module constants that they read; the form's types, constants and options; the
target; and Triton's version, as another one makes other code of the same source. It is the same with and
without Triton's interpreter, so a test can compute it. Statements of programmatic dependent launch are
nothing on GPUs without it, so they are no part of a digest there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import LAUNCH_OPTIONS, WAITS
from plait.ops.launch_chain import FIRST

LENGTH = 12  # hexadecimal digits that a row has
PLAIN = (bool, int, float, str, bytes, tuple, type(None))


class RowKey(NamedTuple):
    """What a row of the report is of."""

    form: str
    target: int  # compute capability, times ten


def digest_form(form: KernelForm, target: int) -> str:
    """The digest of the source that a form has now, on one target."""
    early = is_dependent(form, target)
    parts = ["", repr(target)]  # behind the sources
    parts += [repr((form.num_warps, form.num_stages)), *(["launch_pdl"] if early else [])]
    parts.append(f"triton {_triton_version()}")
    for values in (form.types, list_constants(form), {**LAUNCH_OPTIONS, **form.options}):
        parts.append(repr(sorted(values.items())))
    made = _hash_sources(_function_of(form.kernel), early).copy()
    made.update("\0".join(parts).encode())
    return made.hexdigest()[:LENGTH]


def list_constants(form: KernelForm) -> dict[str, object]:
    """A form's constants, with those that a launch leaves to the kernel."""
    fn = _function_of(form.kernel)
    left = {name: value for name, value in _list_defaults(fn) if name not in form.types} if fn else {}
    return {**left, **form.constants}


def is_dependent(form: KernelForm, target: int) -> bool:
    """Whether a form is launched there before the kernels before it have ended."""
    fn = _function_of(form.kernel)
    return target >= FIRST and fn is not None and WAITS.search(_source_of(fn)) is not None


@cache
def _triton_version() -> str:
    return version("triton")


@cache
def _source_of(fn: FunctionType) -> str:
    return inspect.getsource(fn)


@cache
def _list_defaults(fn: FunctionType) -> tuple[tuple[str, object], ...]:
    found = inspect.signature(fn).parameters.values()
    return tuple((p.name, p.default) for p in found if p.default is not p.empty)


def read_rows(report: Path) -> dict[RowKey, tuple[str, str]]:
    """(digest, line) of each row of a report; none of one that is not there."""
    found: dict[RowKey, tuple[str, str]] = {}
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) > 2 and cells[1].startswith("sm_"):
            found[RowKey(cells[0], int(cells[1].removeprefix("sm_")))] = cells[-1], line
    return found


def find_stale(wanted: Mapping[RowKey, str], report: Path) -> Iterator[str]:
    """What a report lacks, has of another source, or has too much; `wanted`: digests of today's forms."""
    rows = read_rows(report)
    for key, digest in wanted.items():
        name = f"{key.form}, sm_{key.target}"
        if key not in rows:
            yield f"{name}: there is no row"
        elif rows[key][0] != digest:
            yield f"{name}: the row is of the source {rows[key][0]}, which is now {digest}"
    for key in rows.keys() - wanted.keys():
        yield f"{key.form}, sm_{key.target}: there is no such form"


def _function_of(value: object) -> FunctionType | None:
    """The Python function of a kernel, or of a function of constants; None for anything else."""
    inner = getattr(value, "fn", None)
    return inner if isinstance(inner, FunctionType) else None


@cache
def _hash_sources(kernel: FunctionType | None, early: bool) -> hashlib._Hash:
    """The hash of a kernel's sources: hundreds of forms go on from a copy of it."""
    return hashlib.sha256("\0".join(_list_sources(kernel, early)).encode())


def _list_sources(kernel: FunctionType | None, early: bool) -> Sequence[str]:
    """The texts of a kernel and of what it calls, each once, and the constants that they read.

    early: with what programmatic dependent launch needs.
    """
    assert kernel is not None, "a form has a kernel"
    parts: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        fn = waiting.pop()
        name = f"{fn.__module__}.{fn.__qualname__}"
        if name in parts:
            continue
        text, names = _read_source(fn, early)
        parts[name] = text
        for used in names:
            value = fn.__globals__.get(used)
            if (called := _function_of(value)) is not None:
                waiting.append(called)
            elif used in fn.__globals__ and isinstance(value, PLAIN):
                parts[f"{fn.__module__}.{used}"] = repr(value)
            elif hasattr(value, "value"):  # a `tl.constexpr`
                parts[f"{fn.__module__}.{used}"] = repr(getattr(value, "value", None))
    return [f"{name}\n{text}" for name, text in sorted(parts.items())]


@cache
def _read_source(fn: FunctionType, early: bool) -> tuple[str, tuple[str, ...]]:
    """A function's text without comments and docstrings, and the names that it reads."""
    tree = ast.parse(textwrap.dedent(_source_of(fn)))
    if not early:
        tree = _PlainLaunch().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.unparse(tree), tuple(sorted(names))


class _PlainLaunch(ast.NodeTransformer):
    """Takes away what is nothing without programmatic dependent launch."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if ast.unparse(node) == "await_previous()" else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if ast.unparse(node.test).startswith("is_dependent()"):
            return None
        return self.generic_visit(node)
