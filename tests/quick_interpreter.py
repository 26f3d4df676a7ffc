"""Triton's interpreter without the work that it repeats; rows are products of their own. For tests alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


def patch_language_once() -> None:
    """Patch Triton's language once for a launch. The interpreter also does it at each call of a device
    function, which were two fifths of the time of a tiny model's step and change nothing.

    Another two fifths were sums and products in 64 bits, for an assertion that is made in debug mode alone.
    Call it when tests are collected: one that imports no Triton need not wait for it.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # Triton is not imported, or another version
        return
    import triton.language as tl

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    @cache
    def languages(fn: Any) -> list[Any]:
        return [tl, *(value for value in fn.__globals__.values() if value is tl.core)]

    splat = type(builder).create_splat

    def splat_condition(own: Any, kind: Any, scalar: Any) -> Any:
        """A comparison of two integers is a condition; the interpreter spreads it as integers, and from
        Triton 3.9 on refuses these as masks."""
        made = splat(own, kind, scalar)
        if scalar.data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    dot = type(builder).create_dot

    def dot_in_float64(own: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        """The same bits of a row, whatever the rows next to it. numpy's BLAS sums in an order that depends on
        how many there are, on some processors; tensor cores do not."""
        if d.data.dtype != np.float32 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return dot(own, a, b, d, *how)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    def patch_once(fn: Any) -> Any:
        """A launch restores `tl`, so what is no builtin there has been patched by the launch that goes on."""
        if any(tl.core.is_builtin(language.load) for language in languages(fn)):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    type(builder).create_splat = splat_condition
    type(builder).create_dot = dot_in_float64
