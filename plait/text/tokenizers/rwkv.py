"""RWKV's vocabulary ("World"): at each place of a text the longest token that fits, over bytes.

The `tokenizers` library finds the longest of many literals at each place of a text, which it calls added
tokens. Tokens of bytes become such literals with a character for each byte. All 256 bytes are tokens, so no
text has a place without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models

from plait.errors import BadFile
from plait.text.tokenizers.spm import CONTROL, NORMAL, UNUSED

FILE = "rwkv_vocab_v20230424.txt"
END = "<s>"  # the text of token 0, where no file has another one for it
# Older GGUF files have llama.cpp's name of its template instead of one.
TEMPLATE_NAME = "rwkv-world"
TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize ~ ': ' ~ m.content | trim ~ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_LONG_CHARS = 10_000
_BYTES = "latin-1"  # a character for each byte


class RwkvEngine:
    """Ordinary text by the longest tokens. `texts` are escaped, as GGUF has them. Raises BadFile."""

    def __init__(self, texts: Sequence[str], kinds: Sequence[int]) -> None:
        self._tokens = [
            _unescape(t) if kind == NORMAL else None for t, kind in zip(texts, kinds, strict=True)
        ]
        found = {token: i for i, token in enumerate(self._tokens) if token is not None}
        if (count := sum(bytes([byte]) in found for byte in range(256))) != 256:
            raise BadFile(f"tokenizer: {count} byte tokens instead of 256")
        self._ids = list(found.values())
        self._library = tokenizers.Tokenizer(models.WordLevel({}, unk_token=""))
        literals = (token.decode(_BYTES) for token in found)
        self._library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in literals])

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def has_token(self, token_id: int) -> bool:
        return token_id < len(self._tokens) and self._tokens[token_id] is not None

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of `text`. No space is ever prepended."""
        text = text.encode().decode(_BYTES)
        if len(text) < _LONG_CHARS:
            found = self._library.encode(text, add_special_tokens=False)
        else:  # this way the library lets other threads go on meanwhile
            (found,) = self._library.encode_batch([text], add_special_tokens=False)
        return [self._ids[i] for i in found.ids]


def _unescape(text: str) -> bytes:
    """Bytes as Python writes them between quotes: `\\xe4`, `\\n`, `\\\\`. Raises BadFile."""
    try:
        given = text.encode("ascii")
        return given.decode("unicode_escape").encode(_BYTES) if "\\" in text else given
    except UnicodeError as error:
        raise BadFile(f"tokenizer: {text[:80]!r} is no token of bytes") from error


def _read_literal(text: str) -> bytes:
    """The bytes of a string or of bytes, as Python writes either. Raises BadFile."""
    if text.startswith("b"):
        return _unescape(text[2:-1])
    inner = text[1:-1]
    try:
        if "\\" in inner:  # characters beyond Latin-1 become escapes, too
            inner = inner.encode(_BYTES, "backslashreplace").decode("unicode_escape")
        return inner.encode()
    except UnicodeError as error:
        raise BadFile(f"tokenizer: {text[:80]!r} is no text of a token") from error


def rwkv_metadata(path: Path, config: Mapping[str, object], added: Mapping[str, object]) -> dict[str, object]:
    """A vocabulary of lines `id literal length` as GGUF's metadata would have it.

    config: tokenizer_config.json next to it, added: added_tokens.json, which names token 0. Raises BadFile.
    """
    tokens = {0: next((text for text, number in added.items() if number == 0), END)}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        token_id, _, rest = line.partition(" ")
        literal, _, length = rest.rpartition(" ")
        token = _read_literal(literal)
        if line and not (token_id.isdecimal() and length.strip() == str(len(token))):
            raise BadFile(f"{path}, line {number}: it is not id, text and length: {line[:80]!r}")
        tokens |= {int(token_id): repr(token)[2:-1]} if line else {}
    if max(tokens) >= 2 * len(tokens):
        raise BadFile(f"{path}: {len(tokens)} tokens have ids up to {max(tokens)}")
    holes = {i: f"[PAD{i}]" for i in range(max(tokens)) if i not in tokens}
    kinds = [CONTROL, *(UNUSED if i in holes else NORMAL for i in range(1, max(tokens) + 1))]
    key, whole = "tokenizer.ggml.", tokens | holes
    return {
        f"{key}model": "rwkv",
        f"{key}tokens": [whole[i] for i in range(len(kinds))],
        f"{key}token_type": kinds,
        f"{key}bos_token_id": 0,
        f"{key}eos_token_id": 0,
        **{f"{key}{x}": config[x] for x in ("add_bos_token", "add_eos_token") if config.get(x) is not None},
    }
