"""Earlier replies, by cache salt: what followed the last tokens of a sequence in one of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

KEY = 4  # tokens by which places are found
LONGEST = 16  # the most tokens of a match that are compared
MOST_MATCHES = 32  # places that are compared, the last ones first
MOST_TOKENS, MOST_SALTS = 1 << 17, 16  # of one salt, in 24 bytes each, and salts
END = -1  # between two replies
FACTOR, PRIME = 1_000_003, (1 << 31) - 1


class EarlierReplies:
    """The last replies with each salt. Only sequences with the same one read them, as with prefixes."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_salts: int = MOST_SALTS) -> None:
        self._most_tokens, self._most_salts = most_tokens, most_salts
        self._rings: OrderedDict[str, _Ring] = OrderedDict()  # least recently used first

    def keep(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a reply. The oldest ones give way, and so does the salt that was not used for longest."""
        if len(tokens) <= KEY:
            return
        ring = self._rings.get(salt)
        if ring is None:
            if len(self._rings) >= self._most_salts:
                self._rings.popitem(last=False)
            ring = self._rings[salt] = _Ring(self._most_tokens)
        self._rings.move_to_end(salt)
        ring.add(tokens[-self._most_tokens // 2 :])

    def match(self, salt: str, tokens: Sequence[int], limit: int) -> tuple[tuple[int, ...], int]:
        """(up to `limit` tokens that followed the last ones in a reply, how many of these were the same)."""
        ring = self._rings.get(salt)
        if ring is None or len(tokens) < KEY:
            return (), 0
        self._rings.move_to_end(salt)
        return ring.match(tokens, limit)


class _Ring:
    """Tokens, the last ones in place of the oldest. A place is how many had been written before it.

    `_last`: by hash the last place behind a key; `_before`: from each place the one before with that hash.
    Replies are written whole, with numpy; numbers are read one by one, at which arrays are faster.
    """

    def __init__(self, size: int) -> None:
        self._size, self._written = size, 0
        self._tokens, self._before, self._last = (array("q", bytes(8 * size)) for _ in range(3))

    def add(self, tokens: Sequence[int]) -> None:
        begin, new = self._written, np.array([*tokens, END])
        ring, before, last = (np.frombuffer(a, np.int64) for a in (self._tokens, self._before, self._last))
        places = begin + np.arange(len(new))
        ring[places % self._size], before[places % self._size] = new, 0
        keys = np.lib.stride_tricks.sliding_window_view(new[:-2], KEY)  # a token follows each
        found = _hash([keys[:, i] for i in range(KEY)], self._size)
        behind, order = places[KEY:-1], np.argsort(found, kind="stable")
        ordered, sorted_hashes = behind[order], found[order]
        is_first = np.r_[True, sorted_hashes[1:] != sorted_hashes[:-1]]
        before[ordered % self._size] = np.where(is_first, last[sorted_hashes], np.r_[0, ordered[:-1]])
        last[sorted_hashes] = ordered  # of equal ones the last
        self._written += len(new)

    def match(self, tokens: Sequence[int], limit: int) -> tuple[tuple[int, ...], int]:
        """See `EarlierReplies`. The longest match counts, then the last."""
        oldest, size, ring = max(self._written - self._size, 0), self._size, self._tokens
        best, longest = 0, 0
        place = self._last[_hash(tokens[-KEY:], size)]
        for _ in range(MOST_MATCHES):
            if place <= oldest or longest == LONGEST:
                break
            length, most = 0, min(LONGEST, place - oldest, len(tokens))
            while length < most and ring[(place - length - 1) % size] == tokens[-length - 1]:
                length += 1
            if length > max(longest, KEY - 1):  # another key may have the same hash
                best, longest = place, length
            place = self._before[place % size]
        found = []
        for place in range(best, min(best + limit, self._written) if longest else best):
            if (token := ring[place % size]) == END:
                break
            found.append(token)
        return tuple(found), longest


Hashed = TypeVar("Hashed", int, npt.NDArray[np.int64])


def _hash(key: Sequence[Hashed], size: int) -> Hashed:
    """Of a key of tokens, or of each of several: below `size`. Numbers stay within 63 bits."""
    found = key[0]
    for token in key[1:]:
        found = (found * FACTOR + token) % PRIME
    return found % size
