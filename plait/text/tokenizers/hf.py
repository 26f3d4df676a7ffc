"""Vocabularies run by the `tokenizers` library: a `tokenizer.json`, or one rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Struct

from plait.errors import BadFile, UnsupportedFormat, clip_text
from plait.text.tokenizers.tokenizer import Special, SpecialTokens, TextTokenizer, end_of_generation

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LONG_CHARS = 1 << 16
MOST_RECENT = 4096  # tokens of which the bytes are kept: half a megabyte


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2): a printable one for itself."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(moved)}


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: `▁` is a space, `<0x0A>` a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


class HfEngine:
    """Ordinary text by a `tokenizers.Tokenizer`, with its control tokens switched off for good.

    `unused`: ids that the file lists without giving them a meaning; they are holes. `ids`: all ids that
    exist, where the caller knows them, because the library copies its vocabulary to list them.
    Raises UnsupportedFormat for a decoder that is neither byte-level nor SentencePiece's.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        unused: frozenset[int] = frozenset(),
        ids: Collection[int] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._first = tokenizer
        description = _description(tokenizer)
        self._rest = _without_first_space(tokenizer, description) or tokenizer
        self.strips_first_space = _strips_first_space(description)
        if ids is None:
            ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self._ids: Collection[int] = range(self.vocab_size) if len(ids) == self.vocab_size else frozenset(ids)
        self._unused = unused
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._alphabet = byte_alphabet() if _is_byte_level(description) else None
        # The library holds all of them anyway: a second copy is megabytes. A text repeats some thousands.
        self._recent = lru_cache(maxsize=MOST_RECENT)(self._read_token)

    def encode(self, text: str, first: bool) -> list[int]:
        tokenizer = self._first if first else self._rest
        if len(text) < _LONG_CHARS:
            found = tokenizer.encode(text, add_special_tokens=False)
        else:  # takes a moment; of the library's ways only this one lets other threads go on meanwhile
            (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    def has_token(self, token_id: int) -> bool:
        return token_id in self._ids and token_id not in self._unused

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._recent(token_id)

    def _read_token(self, token_id: int) -> bytes | None:
        piece = self._first.id_to_token(token_id) if self.has_token(token_id) else None
        if piece is None:
            return None
        if self._alphabet is None:
            return sentencepiece_bytes(piece)
        if token_id in self._added or not self._alphabet.keys() >= set(piece):
            return piece.encode()
        return bytes(self._alphabet[c] for c in piece)


def _description(tokenizer: tokenizers.Tokenizer) -> dict[str, object]:
    """What a tokenizer.json would say of these two parts; its vocabulary takes long to write and to read."""
    parts = {"decoder": tokenizer.decoder, "pre_tokenizer": tokenizer.pre_tokenizer}
    return {name: part and json.loads(part.__getstate__()) for name, part in parts.items()}


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The members of a (possibly nested) Sequence, in order."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for member in part[inner] for step in _steps(member, inner)]


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    kinds = {step["type"] for step in _steps(description["decoder"], "decoders")}
    if "ByteLevel" in kinds:
        return True
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise UnsupportedFormat(
        f"tokenizer.json: the decoder {sorted(kinds) or 'null'} is not known; known: ByteLevel, Metaspace, "
        "and SentencePiece's (Replace, ByteFallback, Fuse, Strip). Give another vocabulary with --vocab"
    )


def _strips_first_space(description: Mapping[str, Any]) -> bool:
    for step in _steps(description["decoder"], "decoders"):
        if step["type"] == "Strip" and step["start"]:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _without_first_space(
    tokenizer: tokenizers.Tokenizer, description: dict[str, Any]
) -> tokenizers.Tokenizer | None:
    """The same tokenizer for text that does not begin a document; None where that makes no difference."""
    found = False
    for step in _steps(description["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"  # type: ignore[index]
            found = True
    if not found:
        return None
    rest = tokenizers.Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | description))
    rest.encode_special_tokens = True
    return rest


class TokenizerFiles(Struct, frozen=True):
    """The JSON files next to a `tokenizer.json`, parsed; {} for one that is not there."""

    config: Mapping[str, Any]
    special_map: Mapping[str, Any]


def load_hf_tokenizer(path: Path, files: TokenizerFiles | None = None) -> TextTokenizer:
    """A tokenizer from `tokenizer.json` at `path`, with control tokens as the files next to it describe them.

    Raises BadFile when it cannot be read, UnsupportedFormat when it cannot be honoured.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}") from error
    return hf_tokenizer(text, path.name, str(path), files or TokenizerFiles({}, {}))


def hf_tokenizer(text: str, name: str, where: str, files: TokenizerFiles) -> TextTokenizer:
    """The same from the text of a tokenizer.json. `name`: what it is called; `where`: for errors."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise BadFile(
            f"{where}: not a tokenizer.json that the tokenizers library can read: {clip_text(error)}"
        ) from error
    _add_missing(tokenizer, files.config, name)
    wrapping = _find_wrapping(tokenizer)
    specials = SpecialTokens(_specials(tokenizer, files))
    named = read_special_tokens(files)
    bos = tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    before, after = _choose_wrapping(files.config, wrapping, bos, eos)
    if bos is None and before and before[0] in specials.ids:
        bos = before[0]
    engine = HfEngine(tokenizer)
    ends = end_of_generation(specials.by_id.values(), _ordinary_added(tokenizer, specials))
    return TextTokenizer(
        name=name,
        engine=engine,
        specials=specials,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=ends if eos is None else ends | {eos},
        before=before,
        after=after,
        strips_first_space=engine.strips_first_space,
    )


def _add_missing(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> None:
    """Tokens that only tokenizer_config.json knows; their ids must be the next free ones."""
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is not None:
            continue
        flags = {k: bool(entry.get(k, False)) for k in ("lstrip", "rstrip", "single_word", "normalized")}
        token = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry["content"]) != int(token_id):
            raise BadFile(
                f"tokenizer_config.json gives {entry['content']!r} the id {token_id}, which does not follow "
                f"the last id of {name}; give a matching tokenizer.json with --vocab"
            )


def _find_wrapping(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    wrapped = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            return tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :])
    raise UnsupportedFormat(
        "tokenizer.json: its post-processor changes the text's own tokens, which is not supported; "
        "give another vocabulary with --vocab"
    )


def _choose_wrapping(
    config: Mapping[str, object],
    wrapping: tuple[tuple[int, ...], tuple[int, ...]],
    bos: int | None,
    eos: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The post-processor's BOS and EOS, unless tokenizer_config.json says otherwise."""
    before, after = wrapping
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if add_bos is not None and bos is not None:
        others = tuple(i for i in before if i != bos)
        before = (bos, *others) if add_bos else others
    if add_eos is not None and eos is not None:
        others = tuple(i for i in after if i != eos)
        after = (*others, eos) if add_eos else others
    return before, after


def _content(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as text; tokenizer_config.json wins over special_tokens_map.json.

    `extra_special_tokens` may name others ("image_token"), which templates write by these names, too.
    """
    found: dict[str, str] = {}
    for source in (files.special_map, files.config):
        extra = source.get("extra_special_tokens")
        if isinstance(extra, Mapping):
            found |= {str(key): text for key, value in extra.items() if (text := _content(value)) is not None}
        for key in _NAMED:
            text = _content(source.get(key))
            if text is not None:
                found[key] = text
            elif key in source:
                found.pop(key, None)
    return found


def _specials(tokenizer: tokenizers.Tokenizer, files: TokenizerFiles) -> Iterable[Special]:
    additional = [
        _content(t)
        for source in (files.config, files.special_map)
        for t in source.get("additional_special_tokens") or ()
    ]
    promoted = {*read_special_tokens(files).values(), *additional}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special or token.content in promoted:
            yield Special(token_id, token.content, token.lstrip, token.rstrip, token.single_word)


def _ordinary_added(tokenizer: tokenizers.Tokenizer, specials: SpecialTokens) -> Iterable[Special]:
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token_id not in specials.ids:
            yield Special(token_id, token.content)
