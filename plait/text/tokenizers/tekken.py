"""tekken.json, the tokenizer that Mistral publishes with its own files: control tokens first, then BPE ranks.

splintr merges bytes by rank, as the original does. Each rank gets its id when the file is read, so ids need
no shift afterwards. The pattern that cuts text into words must be one of `patterns`: a file's own regular
expression could take exponential time.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import splintr
from msgspec import Struct

from plait.errors import BadFile, UnsupportedFormat, clip_text
from plait.text.tokenizers.builtin import SplintrEngine
from plait.text.tokenizers.patterns import PATTERNS
from plait.text.tokenizers.tokenizer import Special, SpecialTokens, TextTokenizer, end_of_generation
from plait.typed_values import decode_json

TEKKEN = "tekken.json"
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
MOST_FILE_BYTES = 64 << 20  # several times what is published, as are the others
MOST_TOKENS, MOST_SPECIAL = 1 << 20, 1 << 15
MOST_TOKEN_BYTES = 4096
_BYTES = 256  # the first ranks are the single bytes
_UNLISTED = ("v3", "v7")  # files of these versions may lack the list of control tokens
# The control tokens of a file without a list of them.
_SPECIALS = """
<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
"""
Kind = TypeVar("Kind", bound=Struct)
_KNOWN_PATTERNS = frozenset(p.splits[0] for p in PATTERNS.values() if len(p.splits) == 1)


class TekkenConfig(Struct):
    """The sizes, the version and the pattern of a file.

    `default_vocab_size` counts all ids, `default_num_special_tokens` those of control tokens.
    """

    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class TekkenHead(Struct):
    """A file without its vocabulary. `model_settings_builder`: the settings that a conversation may have."""

    config: TekkenConfig
    model_settings_builder: dict[str, object] | None = None


class _Token(Struct):
    rank: int
    token_bytes: str  # base64


class _ControlToken(Struct):
    rank: int
    token_str: str


class _Vocabulary(Struct):
    config: TekkenConfig
    vocab: list[_Token]
    special_tokens: list[_ControlToken] | None = None


def is_tekken(path: Path) -> bool:
    """Whether a file has a name that Mistral gives these files: tekken.json, tekken_240911.json."""
    return path.suffix == ".json" and path.name.startswith("tekken")


def read_tekken_head(path: Path) -> TekkenHead:
    """What a tekken.json says apart from its vocabulary. Raises BadFile."""
    return _read(path, TekkenHead)


def tekken_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a tekken.json. Raises BadFile, and UnsupportedFormat for an unknown pattern."""
    found = _read(path, _Vocabulary)
    config = found.config
    num_special = config.default_num_special_tokens
    if not (0 < num_special <= MOST_SPECIAL and num_special < config.default_vocab_size <= MOST_TOKENS):
        raise BadFile(
            f"{path}: {config.default_vocab_size} tokens of which {num_special} are control tokens; both "
            f"must be there, and at most {MOST_TOKENS} and {MOST_SPECIAL} are read"
        )
    if config.pattern not in _KNOWN_PATTERNS:
        raise UnsupportedFormat(
            f"{path}: the pattern {clip_text(config.pattern)!r} is not known, and a file's own regular "
            "expression is not run; give another vocabulary with --vocab (a tokenizer.json of the model)"
        )
    texts = _special_texts(path, found)
    ranks = _ranks(path, found.vocab[: config.default_vocab_size - num_special], found)
    try:
        library = splintr.Tokenizer.from_bytes(ranks, config.pattern, {})
    except ValueError as error:
        raise BadFile(f"{path}: {clip_text(error)}") from error
    specials = SpecialTokens(Special(i, text) for i, text in enumerate(texts))
    bos, eos = (named.id if (named := specials.by_text.get(text)) else None for text in ("<s>", "</s>"))
    return TextTokenizer(
        name=path.name,
        engine=SplintrEngine(library),
        specials=specials,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=end_of_generation(specials.by_id.values()),
        before=() if bos is None else (bos,),
    )


def _read(path: Path, kind: type[Kind]) -> Kind:
    """The file's JSON as `kind`; what that does not name is passed over. Raises BadFile."""
    try:
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise BadFile(f"{path}: it has {size} bytes, and at most {MOST_FILE_BYTES} are read")
        return decode_json(path.read_bytes(), kind)
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: not a tekken.json that can be read ({clip_text(error)})") from error


def _special_texts(path: Path, found: _Vocabulary) -> list[str]:
    """The texts of the control tokens by id; ids that the file does not list have `<SPECIAL_id>`."""
    num_special, version = found.config.default_num_special_tokens, found.config.version
    if found.special_tokens is None:
        if version not in _UNLISTED:
            raise BadFile(f"{path}: it lists no special_tokens, as files of {version[:20]!r} must")
        listed = dict(enumerate(_SPECIALS.split()))
    else:
        listed = {token.rank: token.token_str for token in found.special_tokens}
        if len(listed) != len(found.special_tokens):
            raise BadFile(f"{path}: two special_tokens have the same rank")
    wrong = next((rank for rank in listed if not 0 <= rank < num_special), None)
    if wrong is not None:
        raise BadFile(f"{path}: a control token has the rank {wrong}, and there are {num_special} of them")
    texts = [listed.get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
    if len(set(texts)) != num_special or "" in texts:
        raise BadFile(f"{path}: two special_tokens have the same text, or one has none")
    return texts


def _ranks(path: Path, vocab: Sequence[_Token], found: _Vocabulary) -> bytes:
    """The vocabulary as lines of base64 and id, as splintr reads it. Raises BadFile."""
    num_special = found.config.default_num_special_tokens
    expected = found.config.default_vocab_size - num_special
    if len(vocab) < expected or expected < _BYTES:
        raise BadFile(f"{path}: its vocab has {len(vocab)} tokens; {max(expected, _BYTES)} are needed")
    ids: dict[bytes, int] = {}
    for rank, entry in enumerate(vocab):
        if entry.rank != rank:
            raise BadFile(f"{path}: vocab[{rank}] has the rank {entry.rank}; ranks must be 0, 1, 2 and so on")
        try:
            token = binascii.a2b_base64(entry.token_bytes, strict_mode=True)
        except ValueError as error:
            raise BadFile(f"{path}: the token_bytes of vocab[{rank}] are not base64 ({error})") from error
        if not 0 < len(token) <= MOST_TOKEN_BYTES or (rank < _BYTES and token != bytes([rank])):
            raise BadFile(
                f"{path}: vocab[{rank}] is a token of {len(token)} bytes; the first {_BYTES} must be the "
                f"single bytes in order, and others have 1 to {MOST_TOKEN_BYTES} bytes"
            )
        if ids.setdefault(token, rank) != rank:
            raise BadFile(f"{path}: vocab[{ids[token]}] and vocab[{rank}] have the same bytes")
    return "\n".join(f"{entry.token_bytes} {entry.rank + num_special}" for entry in vocab).encode()
