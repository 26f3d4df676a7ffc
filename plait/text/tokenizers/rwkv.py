"""RWKV's vocabulary ("World"): at each place of a text the longest token that fits, over bytes.

The `tokenizers` library finds the longest of many literals at each place of a text, which it calls added
tokens. Tokens of bytes become such literals with a character for each byte. All 256 bytes are tokens, so no
text has a place without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models

from plait.errors import BadFile, UnsupportedFormat
from plait.text.tokenizers.spm import CONTROL, NORMAL, UNUSED, USER_DEFINED

FILE = "rwkv_vocab_v20230424.txt"
END = "<s>"  # the text of token 0, where no file has another one for it
# Older GGUF files have llama.cpp's name of its template instead of one.
TEMPLATE_NAME = "rwkv-world"
TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize ~ ': ' ~ (m.content or '') | trim ~ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
MOST_BYTES, MOST_IN_ALL = 1024, 8 << 20  # of a token, of all: several times what is published
_LITERAL = re.compile(r"b?('.*'|\".*\")", re.DOTALL)
_LINE, _ID = re.compile(r"\d+ b?['\"]"), re.compile(r"[1-9]\d{0,6}")
_LONG_CHARS = 10_000
_BYTES = "latin-1"  # a character for each byte


class RwkvEngine:
    """Ordinary text by the longest tokens. `texts` are escaped, as GGUF has them. Raises BadFile.

    What is searched for grows with the longest token, so there is a limit for it, and for all together.
    """

    def __init__(self, texts: Sequence[str], kinds: Sequence[int]) -> None:
        pairs = zip(texts, kinds, strict=True)
        tokens = [_unescape(t) if kind in (NORMAL, USER_DEFINED) else b"" for t, kind in pairs]
        self._tokens = [token or None for token in tokens]
        found = {token: i for i, token in enumerate(tokens) if token}
        _check_tokens(tokens, found)
        self._ids = list(found.values())
        self._library = tokenizers.Tokenizer(models.WordLevel({}, unk_token=""))
        literals = [tokenizers.AddedToken(token.decode(_BYTES), normalized=False) for token in found]
        if self._library.add_tokens(literals) != len(found):
            raise BadFile("tokenizer: some of its tokens cannot be found in texts")

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


def _check_tokens(tokens: Sequence[bytes], found: Mapping[bytes, int]) -> None:
    """Raises BadFile for tokens that are no vocabulary, or would take very long to look for."""
    if (count := sum(bytes([byte]) in found for byte in range(256))) != 256:
        raise BadFile(f"tokenizer: {count} byte tokens instead of 256")
    if (longest := max(map(len, tokens))) > MOST_BYTES or sum(map(len, tokens)) > MOST_IN_ALL:
        raise BadFile(
            f"tokenizer: its longest token has {longest} bytes and all have {sum(map(len, tokens))}; at most "
            f"{MOST_BYTES} and {MOST_IN_ALL} are read"
        )
    if len(found) != sum(map(bool, tokens)):
        raise BadFile("tokenizer: two tokens have the same bytes; an id would never be produced")


def _unescape(text: str) -> bytes:
    """Bytes as Python writes them between quotes: `\\xe4`, `\\n`, `\\\\`. Raises BadFile."""
    try:
        given = text.encode("ascii")
        return given.decode("unicode_escape").encode(_BYTES) if "\\" in text else given
    except UnicodeError as error:
        raise BadFile(f"tokenizer: {text[:80]!r} is no token of bytes") from error


def _read_literal(text: str) -> bytes:
    """The bytes of a string or of bytes, as Python writes either. Raises BadFile."""
    if not _LITERAL.fullmatch(text):
        raise BadFile(f"tokenizer: {text[:80]!r} is not between quotes")
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

    config: tokenizer_config.json next to it, added: added_tokens.json; both may name token 0, and tokens that
    were added. Raises BadFile, and UnsupportedFormat for the list that RWKV-5 had first.
    """
    tokens, kinds = _read_lines(path), {0: CONTROL}
    tokens[0] = END
    for token_id, text, is_special in _list_added(path, config, added):
        if token_id > 0 and tokens.get(token_id, _escape(text)) != _escape(text):
            raise BadFile(
                f"{path}: token {token_id} is {tokens[token_id]!r}, and {text[:80]!r} was added as it"
            )
        kinds[token_id] = CONTROL if is_special or token_id == 0 else USER_DEFINED
        tokens[token_id] = text if kinds[token_id] == CONTROL else _escape(text)
    if max(tokens) >= 2 * len(tokens):
        raise BadFile(f"{path}: {len(tokens)} tokens have ids up to {max(tokens)}")
    holes = {i: f"[PAD{i}]" for i in range(max(tokens)) if i not in tokens}
    key, whole = "tokenizer.ggml.", tokens | holes
    turn = _find_end(config, tokens)
    return {
        f"{key}model": "rwkv",
        f"{key}tokens": [whole[i] for i in range(len(whole))],
        f"{key}token_type": [kinds.get(i, UNUSED if i in holes else NORMAL) for i in range(len(whole))],
        f"{key}bos_token_id": 0,
        f"{key}eos_token_id": 0,
        **({} if turn is None else {f"{key}eot_token_id": turn}),
        **{f"{key}{x}": config[x] for x in ("add_bos_token", "add_eos_token") if config.get(x) is not None},
    }


def _read_lines(path: Path) -> dict[int, str]:
    """The tokens of a file by their ids, escaped. Raises BadFile, UnsupportedFormat."""
    tokens = dict[int, str]()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        lines = [""]
    if not _LINE.match(lines[0]):
        raise UnsupportedFormat(
            f"{path} does not begin with id, text and length: RWKV-5 had an older list first, which is not "
            f"read; --vocab takes the folder or file of RWKV-6's {FILE}"
        )
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token_id, _, rest = line.partition(" ")
        literal, _, length = rest.rpartition(" ")
        if not (_ID.fullmatch(token_id) and int(token_id) not in tokens):
            raise BadFile(
                f"{path}, line {number}: it is not id, text and length of a new token: {line[:80]!r}"
            )
        try:
            token = _read_literal(literal)
        except BadFile as error:
            raise BadFile(f"{path}, line {number}: {error}") from error
        if length.strip() != str(len(token)):
            raise BadFile(
                f"{path}, line {number}: {literal[:80]} has {len(token)} bytes, not {length[:20]!r}"
            )
        tokens[int(token_id)] = repr(token)[2:-1]
    return tokens


def _list_added(
    path: Path, config: Mapping[str, object], added: Mapping[str, object]
) -> Iterator[tuple[int, str, bool]]:
    """(id, text, whether it is a control token) of what was added to a vocabulary. Raises BadFile."""
    for text, number in added.items():
        yield _read_id(path, number), text, False
    listed = config.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, Mapping) else ():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise BadFile(f"{path.parent}: added_tokens_decoder has no content for {str(number)[:20]!r}")
        yield _read_id(path, number), entry["content"], bool(entry.get("special"))


def _read_id(path: Path, number: object) -> int:
    if not (isinstance(number, int | str) and re.fullmatch(r"\d{1,7}", str(number))):
        raise BadFile(f"{path.parent}: an added token has the id {str(number)[:20]!r}")
    return int(number)


def _find_end(config: Mapping[str, object], tokens: Mapping[int, str]) -> int | None:
    """The ordinary token that ends a turn, if the files name one: an empty line, as a rule."""
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    if not isinstance(text, str):
        return None
    wanted = _escape(text)
    return next((i for i, token in tokens.items() if i > 0 and token == wanted), None)


def _escape(text: str) -> str:
    """As GGUF has the bytes of a text."""
    return repr(text.encode())[2:-1]
