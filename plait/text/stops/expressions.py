"""Finds `stop_regex` in a stream, across token borders, and holds back what may become a match.

The text ends where a match is complete first; of the matches that end there, the longest counts. So the end
depends on the text alone, and not on how it was cut into tokens.

Live places of the automaton are kept by where their match would begin, the earliest first:

    text      a b a b c a b        expression  ab(abc|abd)
    groups    ───────┬─────        {begins at 5: "c" or "d" may follow}, {begins here}
    held back        a b           from the earliest beginning on

A state is such a list of groups without its numbers. States and steps between them are made when they are
first needed, and forgotten when there are too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter

from msgspec import Struct, field

from plait.errors import InvalidField
from plait.text.stops.pattern import Nodes, build_nodes
from plait.text.stops.strings import StopMatcher

MOST_KEPT = 50_000  # nodes in all states of an automaton, and tests in the steps between them
MOST_CHARS = 4096  # characters of which the tests are kept, if there are few tests
LEAST_TESTS = 16  # with more, fewer characters are kept
NUM_AUTOMATONS = 32  # of different requests
HERE = -1  # the origin of a group: a match that begins behind the character
BREAK = -1  # among the tests that a character passes: it is a line break


class MatchState(Struct, eq=False):
    """Groups of live nodes, by where their match begins; the last may begin at the next character."""

    groups: tuple[tuple[int, ...], ...]
    steps: dict[frozenset[int], MatchStep] = field(default_factory=dict)


class MatchStep(Struct, frozen=True):
    """Where a character leads. `origins`: by group, which one it was, or HERE.

    `found`: the number of the expression that is complete, and the origin of its match.
    """

    state: MatchState
    origins: tuple[int, ...]
    found: tuple[int, int] | None


class Automaton:
    """The expressions of a request; shared by all streams with the same. Raises InvalidField."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns, self._nodes = patterns, build_nodes(patterns)
        self._tests = {test: number for number, test in enumerate(dict.fromkeys(self._nodes.tests.values()))}
        self._by_node = {node: self._tests[test] for node, test in self._nodes.tests.items()}
        self._chars: dict[str, frozenset[int]] = {}
        self._states: dict[tuple[tuple[int, ...], ...], MatchState] = {}
        self._num_kept = 0
        live, end = reach(self._nodes, (0,), set(), is_start=True, is_line=True)
        if end is not None:
            text = f"{patterns[end]!r:.80} matches an empty text, which would stop at once"
            raise InvalidField(f"stop_regex: {text}; ask for a character at least", "stop_regex")
        self.first = MatchState((live,))

    def step(self, state: MatchState, char: str) -> MatchStep:
        """What a character leads to."""
        passed = self._chars.get(char)
        if passed is None:
            if len(self._chars) * max(len(self._tests), LEAST_TESTS) >= MOST_CHARS * LEAST_TESTS:
                self._chars = {}
            found = {number for test, number in self._tests.items() if test.takes(char)}
            passed = self._chars[char] = frozenset(found | ({BREAK} if char == "\n" else set()))
        return state.steps.get(passed) or self._make(state, passed)

    def _make(self, state: MatchState, passed: frozenset[int]) -> MatchStep:
        seen: set[int] = set()  # a node counts for the earliest match that reaches it
        groups, origins, found, is_line = [], [], None, BREAK in passed
        for origin, group in enumerate(state.groups):
            nexts = [self._nodes.nexts[node] for node in group if self._by_node[node] in passed]
            live, end = reach(self._nodes, nexts, seen, is_line=is_line)
            if end is not None and found is None:
                found = (end, origin)
            if live:
                groups.append(live)
                origins.append(origin)
        live, _ = reach(self._nodes, (0,), seen, is_line=is_line)
        if live:
            groups.append(live)
            origins.append(HERE)
        to = self._intern(tuple(groups))
        self._num_kept += len(passed) + len(origins) + 1
        made = state.steps[passed] = MatchStep(to, tuple(origins), found)
        return made

    def _intern(self, groups: tuple[tuple[int, ...], ...]) -> MatchState:
        if self._num_kept > MOST_KEPT:
            for state in [*self._states.values(), self.first]:
                state.steps.clear()
            self._states, self._num_kept = {}, 0
        if (known := self._states.get(groups)) is not None:
            return known
        self._num_kept += sum(map(len, groups)) + 1
        made = self._states[groups] = MatchState(groups)
        return made


def reach(
    nodes: Nodes, begin: Iterable[int], seen: set[int], *, is_start: bool = False, is_line: bool = False
) -> tuple[tuple[int, ...], int | None]:
    """Nodes that wait for a character, and the first expression that is complete; without those in `seen`.

    `is_start`: no character came yet; `is_line`: a line begins.
    """
    live, end, todo = [], None, [*begin]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in nodes.ends:
            end = nodes.ends[node] if end is None else min(end, nodes.ends[node])
        if node in nodes.tests:
            live.append(node)
        elif (guard := nodes.guards.get(node)) is not None and (is_start or (guard.every and is_line)):
            todo.append(nodes.nexts[node])
        todo += nodes.free[node]
    return tuple(sorted(live)), end


find_automaton = lru_cache(NUM_AUTOMATONS)(Automaton)


class ExpressionMatcher:
    """Watches one stream for stop strings and expressions.

    `matched`: the string, or the expression, that ended the text.
    """

    def __init__(self, strings: tuple[str, ...], patterns: tuple[str, ...], include: bool = False) -> None:
        self._strings = StopMatcher(strings, include=True)
        self._automaton, self._include = find_automaton(patterns), include
        self._state, self._starts = self._automaton.first, [0]
        self._held, self._begin, self._num_seen = "", 0, 0  # `_held` begins at character `_begin`
        self._shown_by_strings = 0
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """As `StopMatcher.push`."""
        if self.matched is not None:
            return "", self.matched
        self._held += text
        for char in text:
            step = self._automaton.step(self._state, char)
            begins, self._num_seen = self._starts, self._num_seen + 1
            self._state = step.state
            self._starts = [self._num_seen if at == HERE else begins[at] for at in step.origins]
            self._shown_by_strings += len(self._strings.push(char)[0])
            found = []
            if (string := self._strings.matched) is not None:
                found.append((self._num_seen - len(string), string))
            if step.found is not None:
                number, at = step.found
                found.append((begins[at], self._automaton.patterns[number]))
            if found:
                return self._end(*min(found, key=itemgetter(0)))
        safe = min(self._starts[0] if self._starts else self._num_seen, self._shown_by_strings)
        shown, self._held = self._held[: safe - self._begin], self._held[safe - self._begin :]
        self._begin = safe
        return shown, None

    def _end(self, at: int, matched: str) -> tuple[str, str]:
        shown = self._held[: (self._num_seen if self._include else at) - self._begin]
        self._held, self.matched = "", matched
        return shown, matched

    def flush(self) -> str:
        """As `StopMatcher.flush`."""
        held, self._held = self._held, ""
        self._begin, self._num_seen, self._shown_by_strings = 0, 0, 0
        self._strings.flush()
        self._state, self._starts = self._automaton.first, [0]
        return held


def open_matcher(
    strings: tuple[str, ...], patterns: tuple[str, ...], include: bool = False
) -> StopMatcher | ExpressionMatcher:
    """What watches one stream for stop strings, and for expressions, if there are any."""
    return ExpressionMatcher(strings, patterns, include) if patterns else StopMatcher(strings, include)
