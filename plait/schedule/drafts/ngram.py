"""Prompt lookup: drafts from what followed the last tokens earlier in the same sequence."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from plait.schedule.drafts.turns import DraftRequest

LONGEST = 4  # the most tokens of a match that are compared; the fewest are two
MOST_MATCHES = 64  # places that are compared, the last ones first


class NgramProposer:
    """Prompt lookup (Saxena 2023): drafts what followed the last tokens earlier in this sequence.

    The longest match of at most `LONGEST` tokens counts, then the last. A step costs the tokens new in it.
    """

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Drafts for the sequences in which the last two tokens appeared together before."""
        found = {}
        for one in wanted:
            index = self._indexes.get(one.seq_id)
            if index is None or not index.is_about(one.token_ids):
                index = self._indexes[one.seq_id] = _Index()
            index.extend(one.token_ids)
            if start := index.match(one.token_ids):
                found[one.seq_id] = _continue_tokens(one.token_ids, start, one.limit)
        return found

    def forget(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)


class _Index:
    """An n-gram index of one sequence: by pair of tokens its last place, and from each the one before.

    A place is the position that follows the pair; 0 is none.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._before = array("q", (0, 0))
        self._token = -1  # the last one that was looked at

    def is_about(self, tokens: Sequence[int]) -> bool:
        """Whether these are the tokens from before and perhaps more, judged by the last of them."""
        count = len(self._before)
        return self._token < 0 or (len(tokens) >= count and tokens[count - 1] == self._token)

    def extend(self, tokens: Sequence[int]) -> None:
        for place in range(len(self._before), len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = place
        self._token = tokens[len(self._before) - 1] if len(tokens) >= len(self._before) else -1

    def match(self, tokens: Sequence[int]) -> int:
        """The place that follows the best match of the last tokens; 0: there is none."""
        if len(tokens) < 2:
            return 0
        best, longest = 0, 0
        place = self._last.get(tokens[-2] << 32 | tokens[-1], 0)
        for _ in range(MOST_MATCHES):
            if not place or longest == LONGEST:
                break
            length = 2
            while length < min(LONGEST, place) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best


def _continue_tokens(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; behind the last known one it goes on with what was just proposed."""
    known = tuple(tokens[start : start + count])
    return tuple(islice(cycle(known), count))
