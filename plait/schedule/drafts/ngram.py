"""Prompt lookup: drafts from what followed the last tokens earlier in a sequence, or in earlier replies."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from plait.schedule.drafts.replies import LONGEST, EarlierReplies
from plait.schedule.drafts.turns import DraftRequest

MOST_MATCHES, MOST_COMPARED = 64, 256  # places that are compared, the last ones first, and tokens of them
SURE = 12  # tokens of a match behind which text nearly always goes on as it did


class NgramProposer:
    """Prompt lookup (Saxena 2023): drafts what followed the last tokens earlier in this sequence, or in an
    earlier reply with the same salt (as SuffixDecoding does; Oliaro et al. 2025).

    The longest match of at most `LONGEST` tokens counts, then that in the sequence, then the last. A step
    costs the tokens new in it.
    """

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}
        self._replies = EarlierReplies()

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Drafts for the sequences in which the last two tokens appeared together before, or the last four
        in a reply."""
        drafts = ((one.seq_id, self._match(one)[0]) for one in wanted)
        return {seq_id: draft for seq_id, draft in drafts if draft}

    def is_sure(self, one: DraftRequest) -> bool:
        """Whether there is a draft behind a match so long that it is probably right."""
        draft, length = self._match(one)
        return length >= SURE and bool(draft)

    def keep(self, salt: str, reply: Sequence[int]) -> None:
        """Draft from a reply that is complete, too, for sequences with this salt."""
        self._replies.keep(salt, reply)

    def forget(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _match(self, one: DraftRequest) -> tuple[tuple[int, ...], int]:
        """(a draft, how many tokens before it were the same there). Each is found once for a plan."""
        index, count = self._indexes.get(one.seq_id), len(one.token_ids)
        if index is None or not index.is_about(one.token_ids):
            index = self._indexes[one.seq_id] = _Index()
        known_count, limit, draft, length = index.found
        if known_count != count or limit < one.limit:
            index.extend(one.token_ids)
            start, length = index.match(one.token_ids)
            draft, longer = self._replies.match(one.salt, one.token_ids, one.limit)
            if draft and longer > length:
                length = longer
            else:
                draft = _continue_tokens(one.token_ids, start, one.limit) if start else ()
            index.found = count, one.limit, draft, length
        return draft[: one.limit], length


class _Index:
    """An n-gram index of one sequence: by pair of tokens its last place, and from each the one before.

    A place is the position that follows the pair; 0 is none. `found`: at how many tokens, for which limit,
    what was drafted, and the length of the match.
    """

    def __init__(self) -> None:
        self.found: tuple[int, int, tuple[int, ...], int] = (-1, 0, (), 0)
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

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(the place that follows the best match of the last tokens, its length); zeros: there is none."""
        if len(tokens) < 2:
            return 0, 0
        best, longest, compared = 0, 0, 0
        place = self._last.get(tokens[-2] << 32 | tokens[-1], 0)
        for _ in range(MOST_MATCHES):
            if not place or longest == LONGEST or compared > MOST_COMPARED:
                break
            length = 2
            while length < min(LONGEST, place) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            compared += length
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best, longest


def _continue_tokens(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; behind the last known one it goes on with what was just proposed."""
    known = tuple(tokens[start : start + count])
    return tuple(islice(cycle(known), count))
