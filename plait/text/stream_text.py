"""From tokens to text that may be shown: whole characters only, and nothing of a stop string.

`StreamDecoder` never shows half a character. `StopMatcher` finds stop strings across token borders, by the
automaton of Aho and Corasick (1975): its state's depth is the longest end of the text so far that may still
become a stop string. Exactly that must be held back. One step per character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.text.tokenizers.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class StreamDecoder:
    """Text of a continuation, token by token.

    The law: `decode(prefix + ids) == decode(prefix) + push(ids[0]) + … + flush()`, for a prefix that ends
    with a whole character. A prefix that ends inside one hands its bytes on, so the character appears.
    `shown`: control tokens with text that appears, although that of the others does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        prefix_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prefix_ids)
        self._at_start = tokenizer.strips_first_space and not tail
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        """The characters that are complete now; "" while one is open."""
        piece = self._shown(token_id)
        if piece and self._at_start:
            piece, self._at_start = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The true end: an open character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _shown(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _tail(self, prefix_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prefix_ids):
            tail = self._shown(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail[-_LONGEST_CHARACTER:]


def text_offsets(
    tokenizer: Tokenizer, ids: Sequence[int], prefix_ids: Sequence[int] = (), skip_special: bool = True
) -> list[int]:
    """Where in the decoded text each token begins, in characters (`logprobs.text_offset`).

    A token that goes on with an open character begins where that character does.
    """
    decoder = StreamDecoder(tokenizer, skip_special, prefix_ids)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(decoder.push(token_id))
    return offsets


@dataclass(slots=True)
class _Node:
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
