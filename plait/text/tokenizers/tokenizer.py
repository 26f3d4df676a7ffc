"""Strings to token ids and back: the one interface that everything above uses, and its one implementation.

Engines do the arithmetic (in `hf`, `builtin`, `spm`, `plamo` and `rwkv`). What must hold for every model is
here: text never becomes a control token unless the caller allows it, decoding never raises, and an id without
a token is a hole that decodes to nothing.

A control token (`<|im_end|>`, `<s>`) is one id with a text. Whether that text means the token or just these
characters is decided by where it came from, never by what it looks like; `SpecialTokens` finds the places.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from msgspec import Struct

from plait.errors import InvalidField

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Tokenizer(Protocol):
    """What the rest of Plait knows of a vocabulary. `vocab_size` is the largest known id plus one.

    `name` says where it came from: 'tokenizer.json', 'cl100k_base', 'gguf:gpt2/smollm'.
    `eos_token_id` is the one that templates write; `eos_token_ids` holds every end-of-generation token: of
    a text, a turn, a message.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def strips_first_space(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]: ...
    def encode_parts(self, parts: Sequence[int | str]) -> list[int]: ...
    def split_special(self, text: str) -> list[int | str]: ...
    def has_special(self, text: str) -> bool: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...
    def token_id(self, text: str) -> int | None: ...
    def is_hole(self, token_id: int) -> bool: ...
    def holes(self, vocab_size: int) -> tuple[int, ...]: ...


class TokenizerBackend(Protocol):
    """The arithmetic of a vocabulary without its control tokens."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of ordinary text. `first`: nothing comes before it, so a space may be prepended."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token stands for in running text; None: there is no such token."""
        ...

    def has_token(self, token_id: int) -> bool:
        """Whether `token_bytes` finds something, at less cost."""
        ...


def join_text(tokenizer: Tokenizer, pieces: Iterable[bytes]) -> str:
    """The text that the bytes of tokens make from its start. Never raises: broken UTF-8 is U+FFFD."""
    joined = b"".join(pieces)
    if tokenizer.strips_first_space:
        joined = joined.removeprefix(b" ")
    return joined.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A vocabulary: an engine for ordinary text plus the control tokens around it.

    `before` and `after` are the ids that `add_special` puts around a text. `space_after_special`: a
    SentencePiece vocabulary that prepends its space after each control token, not only at the start.
    """

    name: str
    engine: TokenizerBackend
    specials: SpecialTokens
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    strips_first_space: bool = False
    space_after_special: bool = False

    @property
    def vocab_size(self) -> int:
        """The largest known id plus one."""
        return max([self.engine.vocab_size, *(i + 1 for i in self.specials.ids)])

    @property
    def special_ids(self) -> frozenset[int]:
        return self.specials.ids

    @property
    def add_bos(self) -> bool:
        return self.bos_token_id is not None and self.bos_token_id in self.before

    def with_ends(self, ids: frozenset[int]) -> TextTokenizer:
        """The same vocabulary, with more end-of-generation tokens."""
        return replace(self, eos_token_ids=self.eos_token_ids | ids)

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids. `add_special`: with BOS and EOS where this vocabulary adds them (never a second BOS).

        `allow_special`: the texts of control tokens become these tokens; only for text that is trusted.
        """
        ids = self.encode_parts(self.split_special(text) if allow_special else [text])
        if not add_special:
            return ids
        before = () if self.before and tuple(ids[: len(self.before)]) == self.before else self.before
        return [*before, *ids, *self.after]

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Ids of a sequence of ready ids and of strings, which never become control tokens.

        Neighbouring strings are one text: where they are cut does not change the ids.
        """
        ids: list[int] = []
        previous: int | None = None
        first = True
        for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
            members = list(group)
            if not is_text:
                ids.extend(int(i) for i in members)
                previous, first = ids[-1], False
            elif text := "".join(str(part) for part in members):
                spaced = first or (self.space_after_special and previous in self.specials.ids)
                ids.extend(self._ordinary(text, spaced))
                first = False
        return ids

    def _ordinary(self, text: str, first: bool) -> list[int]:
        try:
            ids = self.engine.encode(text, first)
        except (TypeError, UnicodeEncodeError) as error:  # the engines take what UTF-8 can write
            raise InvalidField("the text holds half of a surrogate pair, which is not a character") from error
        if self.specials.ids.isdisjoint(ids):
            return ids
        # The vocabulary has the control token as an ordinary piece too: no piece may reach its text.
        pieces = self.specials.cut(text)
        ids = [i for n, piece in enumerate(pieces) for i in self.engine.encode(piece, first and n == 0)]
        return [i for i in ids if i not in self.specials.ids]

    def split_special(self, text: str) -> list[int | str]:
        """`text` as ids of control tokens and ordinary strings between them."""
        return self.specials.split(text)

    def has_special(self, text: str) -> bool:
        return self.specials.occur(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids from the start of a text. Never raises: holes are empty, broken UTF-8 is U+FFFD."""
        shown = (i for i in ids if not (skip_special and i in self.specials.ids))
        return join_text(self, map(self.token_bytes, shown))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in running text; empty for a hole."""
        special = self.specials.by_id.get(token_id)
        if special is not None:
            return special.text.encode()
        return (self.engine.token_bytes(token_id) or b"") if token_id >= 0 else b""

    def token_text(self, token_id: int) -> str:
        """A token as it is shown on its own; half a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The control or ordinary token with exactly this text, if there is one."""
        special = self.specials.by_text.get(text)
        if special is not None:
            return special.id
        wanted = text.encode()
        ids = self.engine.encode(text, False) if text else []
        if len(ids) == 1 and self.token_bytes(ids[0]) == wanted:
            return ids[0]
        every = range(self.vocab_size) if text else ()  # a piece that this text is not cut into
        return next((i for i in every if self.token_bytes(i) == wanted), None)

    def is_hole(self, token_id: int) -> bool:
        """Whether no token has this id."""
        if token_id in self.specials.ids:
            return False
        return token_id < 0 or not self.engine.has_token(token_id)

    def holes(self, vocab_size: int) -> tuple[int, ...]:
        """Ids below `vocab_size` (the model's) that must never be sampled, in order."""
        special, has_token = self.specials.ids, self.engine.has_token  # a loop over a hundred thousand
        return tuple(i for i in range(vocab_size) if i not in special and not has_token(i))


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
        piece = self._show(token_id)
        if piece and self._at_start:
            piece, self._at_start = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The true end: an open character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _show(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _tail(self, prefix_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prefix_ids):
            tail = self._show(token_id) + tail
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


class Special(Struct, frozen=True):
    """A control token. `lstrip`, `rstrip`: it takes the white space on that side.

    `single_word`: it is not found inside a word.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Literals:
    """Finds any of many fixed strings in a text, leftmost and longest first, in linear time.

    An alternation of thousands of literals (Gemma has 6,249 control tokens) would be tried one by one at
    every `<`. Here a candidate costs one set lookup for each length that starts with its two characters.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(t for t in texts if t)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}
        starts = "".join(re.escape(c) for c in sorted({t[0] for t in self._texts}))
        self._start = re.compile(f"[{starts}]") if starts else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every occurrence; they do not overlap."""
        if self._start is None:
            return
        position = 0
        while found := self._start.search(text, position):
            start = found.start()
            end = self._match(text, start)
            if end:
                yield start, end
            position = end or start + 1

    def _match(self, text: str, start: int) -> int:
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                end = start + length
                if end <= len(text) and text[start:end] in self._texts:
                    return end
        return 0


class SpecialTokens:
    """The control tokens of a vocabulary."""

    def __init__(self, specials: Iterable[Special]) -> None:
        self.by_text = {s.text: s for s in specials if s.text}
        self.by_id = {s.id: s for s in self.by_text.values()}
        self.ids = frozenset(self.by_id)
        self._literals = Literals(self.by_text)

    def occur(self, text: str) -> bool:
        """Whether the text of any control token occurs in `text`."""
        return next(self._literals.find(text), None) is not None

    def split(self, text: str) -> list[int | str]:
        """`text` as ordinary strings and ids of control tokens, in order; no string is empty."""
        parts: list[int | str] = []
        position, strip_next = 0, False
        for start, end in self._literals.find(text):
            special = self.by_text[text[start:end]]
            if special.single_word and _inside_word(text, start, end):
                continue
            before = text[position:start]
            before = before.lstrip() if strip_next else before
            parts.append(before.rstrip() if special.lstrip else before)
            parts.append(special.id)
            position, strip_next = end, special.rstrip
        rest = text[position:]
        parts.append(rest.lstrip() if strip_next else rest)
        return [part for part in parts if part != ""]

    def cut(self, text: str) -> list[str]:
        """`text` cut into strings such that none holds the text of a control token."""
        cuts = [start + 1 for start, _ in self._literals.find(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


def _inside_word(text: str, start: int, end: int) -> bool:
    before = start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_")
    return before or (end < len(text) and (text[end].isalnum() or text[end] == "_"))


_ENDS = """
<|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|im_end|> <|end|> <|end_of_turn|>
<end_of_turn> <|return|> <|call|> <|flush|> <|calls|> <|endofturn|> <|stop|> <end_of_utterance>
<|end_of_msg|> <EOT> _<EOT> <|EOT|> [EOT] [EOS] [e~[ <turn|> <｜end▁of▁sentence｜>
"""
_END_OF_GENERATION = frozenset(_ENDS.split())
_ONLY_IF_CONTROL = frozenset({"</s>", "<eos>"})  # HTML's strike-through is an ordinary piece of Gemma


def end_of_generation(control: Iterable[Special], user_defined: Iterable[Special] = ()) -> frozenset[int]:
    """Ids that end a generation, known by their text.

    Harmony's and Solar's `<|end|>` only closes a message: where `<|return|>` and `<|call|>`, or `<|flush|>`
    and `<|calls|>` exist it is not an end.
    """
    texts = {s.text: s.id for s in user_defined if s.text in _END_OF_GENERATION}
    texts |= {s.text: s.id for s in control if s.text in _END_OF_GENERATION | _ONLY_IF_CONTROL}
    if any(pair <= texts.keys() for pair in ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})):
        texts.pop("<|end|>", None)
    return frozenset(texts.values())
