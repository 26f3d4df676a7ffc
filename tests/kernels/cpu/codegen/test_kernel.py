"""How kernels are compiled: without steps of Numba that serve none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core.compiler import DefaultPassBuilder
from numba.core.errors import TypingError

from plait.kernels.cpu.codegen import kernel as compiling
from plait.kernels.cpu.codegen import target
from plait.kernels.cpu.codegen.kernel import Kernel, NativeEntry, inline, remember_signatures
from plait.kernels.cpu.codegen.vec import get_i64, put_i64
from plait.kernels.cpu.runtime.threads import call_entry


@pytest.fixture(autouse=True)
def _no_kept_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile everything."""
    monkeypatch.setattr(target, "_kept", [])


def run(made: Kernel, number: int) -> int:
    """What an entry writes into a word that holds `number`."""
    word = np.array([number], np.int64)
    call_entry(made.address)(word.ctypes.data, 0)
    return int(word[0])


def entry_with_helper() -> tuple[NativeEntry, Any]:
    """An entry that writes 3 n + 1 for a word n, and the function that it calls for this."""

    def triple_and_one(n: int) -> int:
        return 3 * n + 1

    helper: Any = inline(triple_and_one)

    def change(at: int, _: int) -> None:
        put_i64(at, helper(get_i64(at)))

    return NativeEntry(change), helper


def count_look_ups(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Kernel]) -> int:
    """How often Numba's own search for a signature runs while a kernel is compiled."""
    plain, seen = types.BaseFunction.get_call_type, []

    def counted(self: Any, *args: Any) -> Any:
        seen.append(self)
        return plain(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(types.BaseFunction, "get_call_type", counted)
        assert run(build(), 5) == 16
    return len(seen)


def test_steps_that_are_left_out_are_steps_of_this_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, steps = DefaultPassBuilder.define_nopython_pipeline, []

    def listed(state: Any) -> Any:
        made = plain(state)
        steps.append({step[0].__name__ for step in made.passes})
        return made

    monkeypatch.setattr(DefaultPassBuilder, "define_nopython_pipeline", listed)
    assert run(entry_with_helper()[0], 5) == 16
    assert steps
    assert all({*compiling.UNUSED, compiling.FOR_CLOSURES} <= names for names in steps)


def test_kernel_may_have_a_function_inside() -> None:
    def change(at: int, _: int) -> None:
        more = get_i64(at)

        def add(n: int) -> int:
            return n + more

        put_i64(at, add(11))

    assert run(NativeEntry(change), 5) == 16


def test_signatures_are_looked_up_once_for_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(entry_with_helper()[0], 5) == 16
    monkeypatch.setattr(compiling, "_signatures", {})
    first = count_look_ups(monkeypatch, lambda: entry_with_helper()[0])
    second = count_look_ups(monkeypatch, lambda: entry_with_helper()[0])
    assert first > 0 == second


def test_numba_looks_signatures_up_itself_outside_of_kernels_and_after_an_error() -> None:
    plain = types.BaseFunction.get_call_type
    with remember_signatures():
        assert types.BaseFunction.get_call_type is not plain
    assert types.BaseFunction.get_call_type is plain

    def divide(at: int, _: int) -> None:
        put_i64(at, "no number")

    with pytest.raises(TypingError):
        _ = NativeEntry(divide).address
    assert types.BaseFunction.get_call_type is plain
