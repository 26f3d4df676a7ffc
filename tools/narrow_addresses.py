"""Addresses that are computed in 32 bits and may need more: they are right in every small test.

`find_narrow` reads the first code that Triton makes of a form, its MLIR. For each integer it has a bound,
by what the integer comes from: a program's number, an argument, a number that was loaded, a constant. Where
32 bits may not hold a product or a sum, and an address is made of it, the line of the kernel is named.
Negative numbers are taken for indices, too. A line with the comment "# 32 bits hold" and what they hold, or
behind such a line, is taken at its word: a launch may have a limit that no kernel shows.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

HELD = 1 << 31
PROGRAMS = {"x": 1 << 20, "y": 1 << 12, "z": 1 << 12}  # tokens of a prompt; heads, tiles of a vocabulary
ARGUMENT = 1 << 18  # a width or a stride inside of a row: the largest vocabularies
LOADED = {"i1": 1, "i8": 1 << 8, "i16": 1 << 16, "i32": 1 << 20, "i64": 1 << 40}  # tokens, slots; addresses
MOST = 1 << 62

HOLDS = "# 32 bits hold "

RESULT = re.compile(r"^\s*(%[\w.]+)(?::\d+)? = ([\w.]+)(.*?)(?: loc\((#\w+|.*?)\))?\s*$")
VALUE = re.compile(r"%[\w.]+(?:#\d+)?")
INTEGER = re.compile(r"(?:\b|x)(i\d+)>?$")  # of a number, or of a tensor: "i32", "tensor<64x8xi32>"
PLACE = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
BOUNDS: dict[str, Callable[[Sequence[int]], int]] = {
    "arith.muli": lambda b: b[0] * b[1],
    "arith.addi": lambda b: b[0] + b[1],
    "arith.shli": lambda b: b[0] << min(b[1], 32),
    "arith.divsi": lambda b: b[0],
    "arith.shrsi": lambda b: b[0],
    "arith.shrui": lambda b: b[0],
    "arith.minsi": min,
    "arith.minui": min,
    "arith.remsi": min,
    "arith.remui": min,
    "arith.andi": min,
    "arith.select": lambda b: max(b[1:]),
}  # of others the largest of what goes in
GROWS = ("arith.muli", "arith.addi", "arith.shli")


def find_narrow(code: str) -> list[str]:
    """Places of a kernel, as "file:line", where 32 bits may not hold what an address is made of."""
    reader = _Reader(dict(PLACE.findall(code)))
    for line in code.splitlines():
        reader.read(line)
    return sorted(reader.found)


@dataclass(slots=True)
class _Reader:
    """What is known of each value, line by line."""

    places: dict[str, str]
    bounds: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    narrow: dict[str, str] = field(default_factory=dict)  # values that may be wrong, and where they became so
    found: set[str] = field(default_factory=set)
    regions: list[str] = field(default_factory=list)  # what the open ones give their results to

    def read(self, line: str) -> None:
        text = line.strip()
        if text.startswith("tt.func"):
            for name, kind in re.findall(r"(%[\w.]+): (i\d+)", text):
                self.bounds[name] = ARGUMENT if kind == "i32" else LOADED["i64"]
        elif text.startswith("scf.yield"):
            self._give(VALUE.findall(text.split(" : ")[0]))
        elif text.startswith("}"):
            if self.regions and not text.endswith("{"):
                self.regions.pop()
        elif match := RESULT.match(line):
            name, op, rest, place = match.groups()
            self._forget(name)  # another region may have had a value of this name
            if text.split(" loc(")[0].endswith("{") or op.startswith("scf."):
                self._open(name, op, rest)
            else:
                self._compute(name, op, rest, place or "")
        elif text.startswith("scf.") and text.split(" loc(")[0].endswith("{"):
            self._open("", text.split()[0], text)

    def _forget(self, name: str) -> None:
        self.bounds.pop(name, None)
        self.narrow.pop(name, None)
        self.constants.discard(name)

    def _give(self, values: Sequence[str]) -> None:
        """The results of a region: `%x` of one, `%x#0`, `%x#1`, … of more."""
        head = self.regions[-1] if self.regions else ""
        for i, value in enumerate(values):
            for name in (f"{head}#{i}", *((head,) if len(values) == 1 else ())):
                self._copy(name, value)

    def _open(self, name: str, op: str, rest: str) -> None:
        self.regions.append(name)
        if loop := re.search(r"(%[\w.]+) = (%[\w.#]+) to (%[\w.#]+)", rest):
            for bound in loop.groups()[1:]:
                self._copy(loop[1], bound)
        carried = re.search(r"iter_args\((.*?)\) ->", rest)
        for inner, outer in re.findall(r"(%[\w.]+) = (%[\w.#]+)", carried[1]) if carried else ():
            self._copy(inner, outer)
            self.bounds[inner] = max(self.bounds[inner], LOADED["i32"])  # it may grow in the loop

    def _copy(self, name: str, value: str) -> None:
        self.bounds[name] = max(self.bounds.get(name, 0), self.bounds.get(value, 0))
        if value in self.narrow:
            self.narrow[name] = self.narrow[value]

    def _compute(self, name: str, op: str, rest: str, place: str) -> None:
        values = VALUE.findall(rest.split(" : ")[0])
        kind = INTEGER.search(rest.split(" : ")[-1].split(" -> ")[-1].split(" to ")[-1].strip())
        if op == "tt.addptr":
            self.found.update(self.narrow[value] for value in values[1:] if value in self.narrow)
        elif kind and (bound := self._bound(op, rest, kind[1], values)) is not None:
            wrong = next((self.narrow[value] for value in values if value in self.narrow), "")
            if kind[1] == "i32" and bound >= HELD and op in GROWS and not wrong:
                wrong = self._name_place(place)
            self.bounds[name] = min(bound, HELD if kind[1] == "i32" else MOST)
            if wrong and op not in ("tt.load", "arith.cmpi"):
                self.narrow[name] = wrong
            if op == "arith.constant":
                self.constants.add(name)

    def _bound(self, op: str, rest: str, kind: str, values: Sequence[str]) -> int | None:
        if op == "arith.constant":
            number = re.search(r"(-?\d+)>? :", rest)
            return abs(int(number[1])) if number else 1
        if op == "tt.make_range":
            end = re.search(r"end = (\d+)", rest)
            return int(end[1]) if end else MOST
        if op in ("tt.get_program_id", "tt.get_num_programs"):
            return PROGRAMS[rest.split()[0]]
        if op in ("tt.load", "arith.trunci", "arith.fptosi", "arith.fptoui", "arith.bitcast", "tt.bitcast"):
            known = LOADED.get(kind, MOST)
            return min(known, self._of(values[0])) if op == "arith.trunci" else known
        bounds = [self._of(value) for value in values]
        if op == "arith.divsi" and values[1] in self.constants:
            return bounds[0] // max(bounds[1], 1)
        return BOUNDS.get(op, max)(bounds) if bounds else None

    def _of(self, value: str) -> int:
        return self.bounds.get(value, ARGUMENT)

    def _name_place(self, name: str) -> str:
        """ "file:line" of a place; nothing if that line says why 32 bits hold what it computes."""
        for said in self._follow(name):
            if line := re.search(r'"([^"]*)":(\d+)', said):
                is_known = any(HOLDS in linecache.getline(line[1], int(line[2]) - i) for i in (0, 1))
                return "" if is_known else f"{line[1].rpartition('/plait/')[2]}:{line[2]}"
        return name

    def _follow(self, name: str) -> Iterator[str]:
        """What a place is, and the places that it is made of."""
        for _ in range(len(self.places)):
            if name not in self.places:
                return
            said = self.places[name]
            yield said
            further = re.search(r"#loc\d*", said)
            name = further[0] if further else ""
