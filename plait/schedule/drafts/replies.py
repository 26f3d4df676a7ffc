"""Earlier replies, by cache salt: what followed the last tokens of a sequence in one of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

KEY = 4  # tokens by which places are found
LONGEST = 16  # the most tokens of a match that are compared
MOST_MATCHES = 32  # places that are compared, the last ones first
MOST_TOKENS, MOST_SALTS = 1 << 17, 16  # of one salt, and salts: 24 bytes a token
END = -1  # between two replies


class EarlierReplies:
    """The last replies with each salt. Only sequences with the same one read them, as with prefixes."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_salts: int = MOST_SALTS) -> None:
        self._most_tokens, self._most_salts = most_tokens, most_salts
        self._rings: OrderedDict[str, _Ring] = OrderedDict()  # least recently written first

    def keep(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a reply. The oldest ones give way, and so does the salt that got none for longest."""
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
        return ring.match(tokens, limit) if ring and len(tokens) >= KEY else ((), 0)


class _Ring:
    """Tokens, the last ones in place of the oldest. A place is how many had been written before it.

    `_last`: by hash the last place behind a key; `_before`: from each place the one before with that hash.
    """

    def __init__(self, size: int) -> None:
        self._size, self._written = size, 0
        self._tokens, self._before = array("q"), array("q")  # they grow up to `size`
        self._last = array("q", (0,)) * size

    def add(self, tokens: Sequence[int]) -> None:
        begin = self._written
        for token in (*tokens, END):
            place = self._written
            known = 0
            if place - begin >= KEY and token != END:
                at = self._hash(self._tokens[(place - KEY + i) % self._size] for i in range(KEY))
                known, self._last[at] = self._last[at], place
            if place < self._size:
                self._tokens.append(token)
                self._before.append(known)
            else:
                self._tokens[place % self._size], self._before[place % self._size] = token, known
            self._written += 1

    def match(self, tokens: Sequence[int], limit: int) -> tuple[tuple[int, ...], int]:
        """See `EarlierReplies`. The longest match counts, then the last."""
        oldest, size, ring = max(self._written - self._size, 0), self._size, self._tokens
        best, longest = 0, 0
        place = self._last[self._hash(tokens[-KEY:])]
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

    def _hash(self, key: Iterable[int]) -> int:
        return hash(tuple(key)) % self._size
