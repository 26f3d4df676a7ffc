"""The built-in vocabularies and `.tiktoken` files, run by splintr."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import splintr

from plait.errors import BadFile, ConfigError
from plait.text.tokenizers.tokenizer import Special, SpecialTokens, TextTokenizer, end_of_generation
from plait.text.tokenizers.vocabularies import BUILTIN, BuiltinVocabulary

_PATTERNS = {
    "cl100k_base": splintr.CL100K_BASE_PATTERN,
    "o200k_base": splintr.O200K_BASE_PATTERN,
    "llama3": splintr.LLAMA3_PATTERN,
}
_OXIDIZR_ENDS = ("<|user|>", "<|system|>")  # the next turn begins: training data has no end-of-turn token


class SplintrEngine:
    """Ordinary text by a splintr tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.vocab_size
        return size

    def encode(self, text: str, first: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode_ordinary(text)
        return ids

    def token_bytes(self, token_id: int) -> bytes | None:
        try:
            found: bytes = self._tokenizer.decode_token_bytes(token_id)
        except (ValueError, OverflowError):  # how splintr says that there is no such token
            return None
        return found

    def has_token(self, token_id: int) -> bool:
        return self.token_bytes(token_id) is not None


def builtin_tokenizer(name: str, oxidizr: bool = False) -> TextTokenizer:
    """One of the four built-in vocabularies.

    `oxidizr`: as its models were trained: no BOS, and the markers of the next turn end a generation too.
    Raises ConfigError for a name that is not built in.
    """
    vocabulary = BUILTIN.get(name)
    if vocabulary is None:
        raise ConfigError(f"vocab: {name!r} is not a built-in vocabulary; there are {', '.join(BUILTIN)}")
    engine = SplintrEngine(splintr.Tokenizer.from_pretrained(name))
    return _assemble(name, engine, vocabulary, oxidizr)


def _assemble(
    name: str, engine: SplintrEngine, vocabulary: BuiltinVocabulary, oxidizr: bool
) -> TextTokenizer:
    special = vocabulary.special_ids()
    ends = {special[text] for text in (vocabulary.eos, *vocabulary.ends)}
    if oxidizr:
        ends |= {special[text] for text in _OXIDIZR_ENDS}
    bos = None if vocabulary.bos is None else special[vocabulary.bos]
    return TextTokenizer(
        name=name,
        engine=engine,
        specials=_special_tokens(special),
        bos_token_id=bos,
        eos_token_id=special[vocabulary.eos],
        eos_token_ids=frozenset(ends) | end_of_generation(Special(i, text) for text, i in special.items()),
        before=() if bos is None or oxidizr else (bos,),
    )


def _special_tokens(ids: Mapping[str, int]) -> SpecialTokens:
    return SpecialTokens(Special(i, text) for text, i in ids.items())


def tiktoken_tokenizer(path: Path, pattern: str | None = None, oxidizr: bool = False) -> TextTokenizer:
    """A `.tiktoken` file: base64 tokens with their ranks, one a line.

    `pattern` names the built-in vocabulary that has the file's split pattern. A file with the ranks of a
    built-in vocabulary has its control tokens too; any other gets `<|endoftext|>` after its last rank.
    Raises BadFile, or ConfigError when the pattern must be named.
    """
    ranks = _count_ranks(path)
    known = next((v for v in BUILTIN.values() if v.ranks == ranks and v.name in _PATTERNS), None)
    pattern = pattern or (known.name if known else None)
    if pattern not in _PATTERNS:
        raise ConfigError(
            f"vocab: {path.name} has {ranks} ranks, and its split pattern is "
            + ("not known" if pattern is None else f"not {pattern!r}")
            + f"; write --vocab {path.name}@NAME with NAME one of {', '.join(_PATTERNS)}"
        )
    special = known.special_ids() if known else {"<|endoftext|>": ranks}
    try:
        engine = SplintrEngine(splintr.Tokenizer(str(path), _PATTERNS[pattern], special))
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from error
    if known:
        return _assemble(f"{path.name}@{pattern}", engine, known, oxidizr)
    return TextTokenizer(
        name=f"{path.name}@{pattern}",
        engine=engine,
        specials=_special_tokens(special),
        eos_token_id=ranks,
        eos_token_ids=frozenset({ranks}),
    )


def _count_ranks(path: Path) -> int:
    """The largest rank plus one, after a look at every line. Raises BadFile."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from error
    largest = -1
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                token, rank = line.split()
                base64.b64decode(token, validate=True)
                largest = max(largest, int(rank))
        except ValueError as error:
            raise BadFile(
                f"{path}: line {number} is not a base64 token and its rank ({error}); "
                "a .tiktoken file has one such pair a line"
            ) from error
    if largest < 0:
        raise BadFile(
            f"{path}: no token in it; a .tiktoken file has a base64 token and its rank on each line"
        )
    return largest + 1
