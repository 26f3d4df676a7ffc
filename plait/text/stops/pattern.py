"""Regular expressions of `stop_regex`: their syntax, and the automaton that finds them in a stream.

The syntax is what Python's `re` and Rust's `regex` share and a stream can decide: literals, `.`, classes,
groups, `|`, `*`, `+`, `?`, `{m,n}`, `^`, and the flags i, m and s. What must look ahead or back is refused.

An expression becomes an automaton of Thompson's construction (1968). Its size is bounded, and a step visits
each of its nodes at most once, so no expression and no text makes a step slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from plait.errors import InvalidField
from plait.sampling_fields import shorten

MAX_NODES = 1024  # of all expressions of a request
MAX_DEPTH = 32  # of groups in each other
MAX_REPEATS = 1000  # of a counted repetition
KINDS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
LOOKS = ("?=", "?!", "?<=", "?<!", "?>", "?(", "?#", "?P=", "?P>", "?&", "?R")


class CharTest(Struct, frozen=True):
    """Which characters a place of an expression takes: those of `ranges` and of `kinds`, or no such one.

    `kinds`: letters of KINDS; a capital means every other character. `folds`: in either case.
    """

    ranges: tuple[tuple[str, str], ...] = ()
    kinds: str = ""
    is_negated: bool = False
    folds: bool = False

    def takes(self, char: str) -> bool:
        """Whether it takes this character."""
        forms = {char, *(form for form in (char.lower(), char.upper()) if self.folds and len(form) == 1)}
        found = any(low <= form <= high for form in forms for low, high in self.ranges)
        found = found or any(KINDS[kind.lower()](char) is kind.islower() for kind in self.kinds)
        return found is not self.is_negated


class Sequenced(Struct, frozen=True):
    """One part behind the other."""

    parts: tuple[Part, ...]


class Either(Struct, frozen=True):
    """One of these parts."""

    parts: tuple[Part, ...]


class RepeatedPart(Struct, frozen=True):
    """A part `least` to `most` times; None: without an end."""

    part: Part
    least: int
    most: int | None


class LineStart(Struct, frozen=True):
    """Where the text begins; with `every`, also behind each line break."""

    every: bool


Part = CharTest | Sequenced | Either | RepeatedPart | LineStart
ANY_BUT_BREAK = CharTest((("\n", "\n"),), is_negated=True)
ANY = CharTest(is_negated=True)


class Nodes(Struct):
    """The nodes of an automaton, by number. 0 is where every expression begins.

    `free`: nodes that are reached without a character; `tests` and `nexts`: what a node takes, and where it
    leads. `guards`: nodes that only let through where a line or the text begins. `ends`: by node, the number
    of the expression that is complete there.
    """

    free: list[list[int]] = field(default_factory=lambda: [[]])
    tests: dict[int, CharTest] = field(default_factory=dict)
    nexts: dict[int, int] = field(default_factory=dict)
    guards: dict[int, LineStart] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, *, behind: int | None = None) -> int:
        """A new node; `behind`: reached from that one without a character."""
        if len(self.free) >= MAX_NODES:
            raise _make_error(f"the expressions have more than {MAX_NODES} places in all; send shorter ones")
        self.free.append([])
        if behind is not None:
            self.free[behind].append(len(self.free) - 1)
        return len(self.free) - 1

    def append(self, part: Part, at: int) -> int:
        """Add a part that begins at a node; returns the node where it ends."""
        if isinstance(part, Sequenced):
            for one in part.parts:
                at = self.append(one, at)
            return at
        if isinstance(part, Either):
            ends = [self.append(one, self.add(behind=at)) for one in part.parts]
            joined = self.add()
            for end in ends:
                self.free[end].append(joined)
            return joined
        if isinstance(part, RepeatedPart):
            return self._repeat(part, at)
        node, end = self.add(behind=at), self.add()
        if isinstance(part, CharTest):
            self.tests[node], self.nexts[node] = part, end
        else:
            self.guards[node], self.nexts[node] = part, end
        return end

    def _repeat(self, part: RepeatedPart, at: int) -> int:
        for _ in range(part.least):
            at = self.append(part.part, self.add(behind=at))  # a node for each: the work is bounded by them
        if part.most is None:
            begin = self.add(behind=at)
            self.free[self.append(part.part, begin)].append(begin)
            return self.add(behind=begin)
        end = self.add(behind=at)
        for _ in range(part.most - part.least):
            at = self.append(part.part, self.add(behind=at))
            self.free[at].append(end)
        return end


def build_nodes(patterns: Sequence[str]) -> Nodes:
    """The automaton of some expressions. Raises InvalidField for one that no stream can be searched for."""
    nodes = Nodes()
    for number, pattern in enumerate(patterns):
        end = nodes.append(PatternReader(pattern).read(), nodes.add(behind=0))
        nodes.ends[end] = number
    return nodes


def _make_error(why: str) -> InvalidField:
    return InvalidField(f"stop_regex: {why}", "stop_regex")


class PatternReader:
    """Reads one expression, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0
        self._flags = ""

    def read(self) -> Part:
        """The whole expression. Raises InvalidField, naming the place."""
        if not self._text:
            raise _make_error("an empty expression would stop at once; leave it out")
        found = self._either()
        if self._at < len(self._text):
            raise self._wrong("there is no group to close here")
        return found

    def _wrong(self, why: str) -> InvalidField:
        return _make_error(f"{shorten(self._text)}, at character {self._at}: {why}")

    def _sees(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _takes(self, text: str) -> bool:
        found = self._sees(text)
        self._at += len(text) * found
        return found

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise self._wrong("the expression ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _either(self) -> Part:
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._at < len(self._text) and not self._sees("|") and not self._sees(")"):
            parts.append(self._read_quantified(self._atom()))
        return Sequenced(tuple(parts))

    def _read_quantified(self, part: Part) -> Part:
        begin = self._at
        bounds = self._bounds()
        if bounds is None:
            return part
        self._takes("?")  # as few as possible: the first end counts in any case
        if self._sees("+") or self._bounds() is not None:
            self._at = begin
            raise self._wrong("a repetition of a repetition; put the inner one into a group")
        return RepeatedPart(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return bounds
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(end, 0)].partition(",")
        if not self._sees("{") or not (least.isdecimal() or (comma and most.isdecimal())):
            return None  # a brace of its own
        if (most and not most.isdecimal()) or max(len(least), len(most)) > 4:
            raise self._wrong(f"a repetition must be {{m,n}}, of at most {MAX_REPEATS}")
        low = int(least or 0)
        high = (int(most) if most else None) if comma else low
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._wrong(f"a repetition must be {{m,n}}, with m ≤ n, of at most {MAX_REPEATS}")
        self._at = end + 1
        return low, high

    def _atom(self) -> Part:
        char = self._char()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return ANY if "s" in self._flags else ANY_BUT_BREAK
        if char == "^":
            return LineStart("m" in self._flags)
        if char == "$":
            raise self._wrong("$ would need the text that follows; end with a character that must come")
        if char in "*+?":
            self._at -= 1
            raise self._wrong("there is nothing to repeat")
        return self._read_escape() if char == "\\" else self._literal(char)

    def _literal(self, char: str) -> CharTest:
        return CharTest(((char, char),), folds="i" in self._flags)

    def _group(self) -> Part:
        if any(self._sees(look) for look in LOOKS):
            raise self._wrong("it must look ahead, back or at a group, which a stream cannot; leave it out")
        flags = self._flags
        if self._takes("?"):
            if self._sees("P<") or self._sees("<"):
                end = self._text.find(">", self._at)
                if end < 0:
                    raise self._wrong("the name of this group has no end")
                self._at = end + 1
            elif self._switches():
                return Sequenced(())
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"more than {MAX_DEPTH} groups are in each other")
        found = self._either()
        if not self._takes(")"):
            raise self._wrong("a group has no end")
        self._depth -= 1
        self._flags = flags
        return found

    def _switches(self) -> bool:
        """Reads the flags of a group; whether they hold from here on, and are no group."""
        while not self._takes(":"):
            char = self._char()
            if char == ")":
                return True
            if char not in "ims":
                self._at -= 1
                raise self._wrong("a group begins with (, (?:, (?P<name> or flags of i, m and s")
            self._flags += char
        return False

    def _read_escape(self) -> Part:
        char = self._char()
        if char == "A":
            return LineStart(every=False)
        if char in "bBzZ<>" or (char.isdecimal() and char != "0"):
            raise self._wrong(f"\\{char} needs other text than its own, which a stream cannot; leave it out")
        if char.lower() in KINDS:
            return CharTest(kinds=char)
        return self._literal(self._read_escaped_char(char))

    def _read_escaped_char(self, char: str) -> str:
        """The character that an escape stands for, of which the letter is read."""
        if char in CONTROLS:
            return CONTROLS[char]
        if (count := HEX_DIGITS.get(char)) is not None:
            if self._takes("{"):
                digits, _, _ = self._text[self._at :].partition("}")
                self._at += 1
            else:
                digits = self._text[self._at : self._at + count]
            self._at += len(digits)
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise self._wrong(f"\\{char} names no character") from None
        if char.isalnum():
            raise self._wrong(f"\\{char} is not known; write the characters it stands for")
        return char

    def _class(self) -> CharTest:
        is_negated, ranges, kinds, is_first = self._takes("^"), [], "", True
        while is_first or not self._takes("]"):
            is_first = False
            if any(self._sees(sign) for sign in ("[:", "&&", "--", "~~")):
                raise self._wrong("classes in classes are not read; list the characters, or escape them")
            low = self._char()
            if low == "\\":
                low = self._char()
                if low.lower() in KINDS:
                    kinds += low
                    continue
                low = "\b" if low == "b" else self._read_escaped_char(low)
            high = low
            if self._sees("-") and not self._sees("-]"):
                self._at += 1
                high = self._char()
                if high == "\\":
                    high = self._read_escaped_char(self._char())
                if high < low:
                    raise self._wrong("a range must go upwards")
            ranges.append((low, high))
        return CharTest(tuple(ranges), kinds, is_negated, folds="i" in self._flags)
