"""Straight blocks: parts of a kernel that are written directly as LLVM instructions, past Numba.

Numba takes about a millisecond to find out the types of one call and to lower it, and a register tile is
hundreds of calls of `vec`. A straight block is a Python function that runs once, while Numba lowers the one
call of it: every operation it does writes the instructions that this operation of `vec` stands for. So
Python's own loops write a tile of any size; loops of the kernel are `Writer.loop`.

The cache of kernels does not read these functions: the text of a kernel that uses them names the digest
of their files (`digest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from hashlib import sha256
from inspect import Parameter, Signature, signature
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.cpu.codegen.target import ROOT
from plait.kernels.cpu.codegen.vec import DEFINED, VF, A, F, N, f32, i32, i64

Value: TypeAlias = ir.Value
"""What a straight block calculates with, unless it is a `Word`: a vector, a float or an int32 of LLVM."""


class Word:
    """An int64 of a running kernel, an address or a size, that a straight block calculates with."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def _with(self, other: Word | int, operation: str, **how: object) -> Word:
        return Word(self.builder, getattr(self.builder, operation)(self.value, _raw_word(other), **how))

    def __add__(self, other: Word | int) -> Word:
        return self if isinstance(other, int) and other == 0 else self._with(other, "add", flags=("nsw",))

    def __sub__(self, other: Word | int) -> Word:
        return self._with(other, "sub", flags=("nsw",))

    def __mul__(self, other: Word | int) -> Word:
        return self._with(other, "mul", flags=("nsw",))

    def __rshift__(self, bits: int) -> Word:
        return self._with(bits, "ashr")

    def __lshift__(self, bits: int) -> Word:
        return self._with(bits, "shl", flags=("nsw",))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Word | int) -> Word:
        """Of numbers that are not negative."""
        return self._with(other, "sdiv")

    def least(self, other: Word | int) -> Word:
        """The smaller of both."""
        return self._pick("<", other)

    def most(self, other: Word | int) -> Word:
        """The larger of both."""
        return self._pick(">", other)

    def above(self, other: Word | int) -> ir.Value:
        """Whether this is more: a condition for `Writer.when`."""
        return self.builder.icmp_signed(">", self.value, _raw_word(other))

    def equals(self, other: Word | int) -> ir.Value:
        return self.builder.icmp_signed("==", self.value, _raw_word(other))

    def _pick(self, sign: str, other: Word | int) -> Word:
        right = _raw_word(other)
        mine = self.builder.icmp_signed(sign, self.value, right)
        return Word(self.builder, self.builder.select(mine, self.value, right))


class Writer:
    """Has every operation of `vec` as a method that writes its instructions: `w.fma(x, y, z)`.

    Addresses and sizes are `Word`s; a Python number is a constant. Vectors, floats and int32 are values of
    LLVM: only operations take them.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in DEFINED:
            raise AttributeError(f"plait.kernels.cpu.codegen.vec has no operation {name}")
        result, arguments, emit = DEFINED[name]

        def write(*values: object) -> Any:
            given = [self._value(v, kind) for v, kind in zip(values, arguments, strict=True)]
            made = emit(self._builder, *given)
            return Word(self._builder, made) if result == A else made

        return write

    def loop(
        self,
        first: Word | int,
        end: Word | int,
        step: int,
        carried: Sequence[Value],
        body: Callable[..., Sequence[Value] | None],
    ) -> list[Value]:
        """for i in range(first, end, step): carried = body(i, *carried). Gives what was carried last.

        Carried values, vectors or words, stay in registers where there are enough.
        """
        stop = Word(self._builder, self._value(end, A))

        def inside(i: Word, *now: Value) -> list[Value]:
            after = i + step
            return [after, *(body(i, *now) or ())]

        start = Word(self._builder, self._value(first, A))
        return self.repeat([start, *carried], lambda i, *now: stop.above(i), inside)[1:]

    def repeat(
        self,
        carried: Sequence[Value],
        more: Callable[..., ir.Value],
        body: Callable[..., Sequence[Value]],
    ) -> list[Value]:
        """while more(*carried): carried = body(*carried). Gives what was carried last."""
        b, before = self._builder, self._builder.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        phis = [b.phi(_raw(c).type) for c in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(_raw(value), before)
        now = self._like(carried, phis)
        b.cbranch(more(*now), inside, after)
        b.position_at_end(inside)
        made = body(*now)
        for phi, value in zip(phis, made, strict=True):
            phi.add_incoming(_raw(value), b.block)
        b.branch(head)
        b.position_at_end(after)
        return now

    def number(self, value: int) -> Word:
        return Word(self._builder, ir.Constant(i64, value))

    def pick(self, condition: ir.Value, x: Any, y: object) -> Any:
        """x if condition else y: two words, or two other values of one type."""
        made = self._builder.select(condition, _raw(x), _raw(y))
        return Word(self._builder, made) if isinstance(x, Word) else made

    def when(self, condition: ir.Value, body: Callable[[], Any]) -> None:
        """if condition: body()."""
        with self._builder.if_then(condition):
            body()

    def unless_zero(
        self, word: Word, carried: Sequence[Value], body: Callable[..., Sequence[Value]]
    ) -> list[Value]:
        """carried = body(*carried) if word != 0. Gives what is carried then."""
        b, before = self._builder, self._builder.block
        with b.if_then(b.icmp_signed("!=", word.value, ir.Constant(i64, 0))):
            made = [_raw(m) for m in body(*carried)]
            inside = b.block
        phis = [b.phi(m.type) for m in made]
        for phi, old, new in zip(phis, carried, made, strict=True):
            phi.add_incoming(_raw(old), before)
            phi.add_incoming(new, inside)
        return self._like(carried, phis)

    def _like(self, carried: Sequence[Value], values: Sequence[ir.Value]) -> list[Value]:
        """These values, those in place of words as words."""
        pairs = zip(carried, values, strict=True)
        return [Word(self._builder, v) if isinstance(c, Word) else v for c, v in pairs]

    def _value(self, value: Any, kind: object) -> ir.Value:
        if isinstance(value, Word):
            return self._builder.trunc(value.value, i32) if kind == N else value.value
        if isinstance(value, ir.Value):
            return value
        if kind == F:
            return ir.Constant(f32, float(value))
        return ir.Constant(i64 if kind == A else i32, int(value))

    def open_argument(self, context: Any, value: ir.Value, kind: object) -> Any:
        """An argument as the block sees it: a `Word` for an int, a list for a tuple, or the value itself."""
        if isinstance(kind, types.BaseTuple):
            of_tuple: Any = kind
            parts = cgutils.unpack_tuple(self._builder, value, len(kind))
            return [self.open_argument(context, p, k) for p, k in zip(parts, of_tuple, strict=True)]
        if isinstance(kind, types.Integer):
            return Word(self._builder, context.cast(self._builder, value, kind, A))
        return value


def _raw_word(value: Word | int) -> ir.Value:
    return value.value if isinstance(value, Word) else ir.Constant(i64, int(value))


def _raw(value: object) -> ir.Value:
    return value.value if isinstance(value, Word) else value


def straight(write: Callable[..., Sequence[Value] | None], *, gives: int = 0, kind: object = VF) -> Any:
    """An intrinsic with the instructions that `write(w, *arguments)` writes, w being a `Writer`.

    A call gives a tuple of `gives` values of that kind, vectors or (A) words; 0: a number without meaning.
    Arguments: ints, floats, vectors, and tuples of them, like the one that another call gave.
    """

    def typed(context: Any, *arguments: Any) -> tuple[Any, Any]:
        def lowered(target: Any, builder: ir.IRBuilder, call: Any, values: Sequence[ir.Value]) -> ir.Value:
            w = Writer(builder)
            made = write(w, *(w.open_argument(target, v, k) for v, k in zip(values, call.args, strict=True)))
            found = [_raw(m) for m in made or ()]
            if len(found) != gives:
                raise ValueError(f"a straight block gave {len(found)} values of {gives}")
            if not gives:
                return ir.Constant(i32, 0)
            return cgutils.pack_array(builder, found, target.get_value_type(kind))

        result: Any = types.UniTuple(kind, gives) if gives else N
        return result(*arguments), lowered

    typed.__signature__ = signature(write)  # type: ignore[attr-defined]  # Numba asks how many arguments
    typed.__name__ = typed.__qualname__ = getattr(write, "__name__", "straight")
    return intrinsic(typed)


def block(*, takes: int = 0, gives: int | Callable[..., int] = 0) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function (*made_for, w, *arguments) -> one that makes its straight block for `made_for`.

    takes: how many words its `*words` stands for; gives: as in `straight`, or computed from `made_for`.
    """

    def family(write: Callable[..., object]) -> Any:
        @cache
        def make(*made_for: Any) -> Any:
            one: Any = partial(write, *made_for)
            if takes:
                names = ["w", *(f"word{i}" for i in range(takes))]
                one.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])
            return straight(one, gives=gives(*made_for) if callable(gives) else gives)

        return wraps(write)(make)

    return family


def digest(*files: str) -> str:
    """Of this file and others of plait/kernels/cpu. It is in a kernel's text, which changes with them."""
    hashed = sha256()
    for name in ("codegen/llvm_writer.py", *files):
        hashed.update((ROOT / name).read_bytes())
    return hashed.hexdigest()
