"""Finds stop strings across token borders, by the automaton of Aho and Corasick (1975).

Its state's depth is the longest end of the text so far that may still become a stop string. Exactly that must
be held back. One step per character.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field


class _Node(Struct):
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    match: int = 0  # length of the longest stop string that ends here


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.match = len(stop)
    queue = deque(root.next.values())
    for node in queue:
        node.fail = root
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            child.fail = _step(node.fail, char, root)
            child.match = child.match or child.fail.match
            queue.append(child)
    return root


def _step(node: _Node | None, char: str, root: _Node) -> _Node:
    while node is not None:
        if char in node.next:
            return node.next[char]
        node = node.fail
    return root


class StopMatcher:
    """Watches one stream for `stops`. `include`: the stop string itself is part of the text.

    The first stop string to be complete wins; of several that end at the same character, the longest.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops, self._include = stops, include
        self._root = self._node = _automaton(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ended the stream if one did).

        After a match everything further is swallowed.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        seen = self._held + text
        node = self._node
        for i, char in enumerate(text, len(self._held) + 1):
            node = _step(node, char, self._root)
            if node.match:
                self.matched = seen[i - node.match : i]
                self._held = ""
                return seen[: i if self._include else i - node.match], self.matched
        self._node = node
        self._held = seen[len(seen) - node.depth :]
        return seen[: len(seen) - node.depth], None

    def flush(self) -> str:
        """What was held back, at the end of a stream that no stop string ended."""
        held, self._held, self._node = self._held, "", self._root
        return held
