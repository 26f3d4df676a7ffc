"""A model's tokenizer and chat template as GGUF metadata."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.engine.opening import Opened
from plait.errors import BadFile, UnsupportedFormat
from plait.text.gguf_tokenizer import gguf_tokenizer
from plait.text.load import template_sources
from plait.text.patterns import PATTERNS
from plait.text.sentencepiece_file import sentencepiece_metadata
from plait.text.spm import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from plait.text.tokenizer import Tokenizer

log = logging.getLogger("plait")
KEY = "tokenizer.ggml."
USUAL = ("llama-bpe", "smollm")  # of several names for the same, the one that most files have
# Every class of character that the known vocabularies cut at, and what they treat apart.
PROBE = (
    "Hello, world!  It's 2024-11-21; I'd say she'LL don't.\n\n\tdef f(x):\r\n    return x**2 + 3.14  # ok\n"
    "Ünïcödé straße ÇA ñandú — “quotes” … 日本語のテキスト 한국어 русский язык עברית हिन्दी 1234567890\n"
    "a_b-c/d\\e @user #tag $9.99 100% 🙂🙃👩‍👩‍👧 CamelCaseWORDS x²≤y  \n \n   trailing   "
)


def vocabulary_keys(opened: Opened) -> dict[str, Any]:
    """The `tokenizer.` keys of a file of this model. Raises UnsupportedFormat for vocabularies GGUF lacks."""
    metadata = opened.metadata
    if metadata and f"{KEY}model" in metadata:
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    directory, tokenizer = opened.text_directory, opened.tokenizer()
    if tokenizer is None or directory is None or not _has_files(directory):
        log.warning("no tokenizer is carried along: the model has no tokenizer.json or tokenizer.model")
        return {f"{KEY}model": "no_vocab"}
    keys = _from_files(directory, tokenizer, opened.resolved.spec.vocab_size)
    keys |= _ids(tokenizer)
    _check(keys, tokenizer)
    named = template_sources(directory, None)
    if default := named.pop("default", None):
        keys["tokenizer.chat_template"] = default
    keys |= {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    return keys


def _has_files(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _from_files(directory: Path, tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    if not path.exists():
        return _padded(sentencepiece_metadata(directory / "tokenizer.model"), size)
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        model = description["model"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadFile(f"{path}: not a tokenizer.json ({error})") from error
    if model.get("type") != "BPE":
        raise UnsupportedFormat(
            f"{path}: a vocabulary of the kind {model.get('type')} cannot be written as GGUF; known: BPE"
        )
    tokens, kinds = _tokens(description, tokenizer)
    keys: dict[str, Any] = {f"{KEY}tokens": tokens, f"{KEY}token_type": kinds}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        keys |= {f"{KEY}model": "llama", f"{KEY}scores": _scores(directory, tokens, merges)}
        keys[f"{KEY}add_space_prefix"] = (
            tokenizer.token_text(tokenizer.encode("a", add_special=False)[0]) != "a"
        )
    else:
        keys |= {f"{KEY}model": "gpt2", f"{KEY}merges": merges, f"{KEY}pre": _pre(description)}
    return _padded(keys, size)


def _tokens(description: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    """Texts and kinds by id; ids that nobody has are holes."""
    model = description["model"]
    by_id = {i: text for text, i in model["vocab"].items()}
    added = {t["id"]: t for t in description.get("added_tokens") or ()}
    by_id |= {i: t["content"] for i, t in added.items()}
    tokens, kinds = [], []
    for i in range(max(by_id) + 1):
        text = by_id.get(i)
        tokens.append(f"[PAD{i}]" if text is None else text)
        if text is None:
            kinds.append(UNUSED)
        elif text == model.get("unk_token"):
            kinds.append(UNKNOWN)
        elif i in tokenizer.special_ids:
            kinds.append(CONTROL)
        elif i in added:
            kinds.append(USER_DEFINED)
        else:
            kinds.append(BYTE if model.get("byte_fallback") and _is_byte(text) else NORMAL)
    return tokens, kinds


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(directory: Path, tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """SentencePiece's own scores, if its file is there; else the order of merges, the best first."""
    path = directory / "tokenizer.model"
    if path.exists():
        found = sentencepiece_metadata(path)
        named = dict(zip(found[f"{KEY}tokens"], found[f"{KEY}scores"], strict=True))
        return [float(named.get(text, 0.0)) for text in tokens]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    last = len(merges)
    return [-float(ranks.get(text, last)) for text in tokens]


def _padded(keys: dict[str, Any], size: int) -> dict[str, Any]:
    """As many tokens as the model has rows."""
    tokens = keys[f"{KEY}tokens"]
    if len(tokens) > size:
        raise UnsupportedFormat(
            f"the tokenizer has {len(tokens)} tokens and the model {size} rows; GGUF wants as many of both"
        )
    missing = range(len(tokens), size)
    unused = [UNUSED] * len(missing)
    filled: dict[str, list[Any]] = {"tokens": [f"[PAD{i}]" for i in missing], "token_type": unused}
    filled["scores"] = [0.0] * len(missing)
    for kind, more in filled.items():
        if f"{KEY}{kind}" in keys:
            keys[f"{KEY}{kind}"] = [*keys[f"{KEY}{kind}"], *more]
    return keys


def _pre(description: Mapping[str, Any]) -> str:
    """What GGUF calls the way this vocabulary cuts text into words; "default" where it has no name for it."""
    found = tuple(_plain(regex) for regex in _splits(description.get("pre_tokenizer")))
    whole_words = bool(description["model"].get("ignore_merges"))
    named = [
        (name, pattern)
        for name, pattern in PATTERNS.items()
        if tuple(_plain(regex) for regex in pattern.splits) == found
    ]
    exact = [name for name, pattern in named if pattern.whole_words == whole_words]
    found_names = exact or [name for name, _ in named] or ["default"]
    return next((name for name in USUAL if name in found_names), found_names[0])


def _splits(part: Mapping[str, Any] | None) -> list[str]:
    """The regular expressions of a pre-tokenizer, one after the other."""
    if part is None:
        return []
    match part["type"]:
        case "Sequence":
            return [regex for inner in part["pretokenizers"] for regex in _splits(inner)]
        case "Split":
            return [part["pattern"].get("Regex") or part["pattern"].get("String", "")]
        case "Digits" if part.get("individual_digits"):
            return [r"\p{N}"]
        case "ByteLevel":
            return list(PATTERNS["gpt-2"].splits) if part.get("use_regex", True) else []
        case other:
            return [f"<{other}>"]


def _plain(regex: str) -> str:
    """One spelling for what can be written in two."""
    plain = re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda m: chr(int(m[1], 16)), regex)
    return plain.replace(r"\/", "/")


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """What begins and ends a text."""
    found: dict[str, Any] = {}
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None:
        found[f"{KEY}bos_token_id"] = bos
    if eos is not None:
        found[f"{KEY}eos_token_id"] = eos
    wrapped = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special=False)
    found[f"{KEY}add_bos_token"] = bos is not None and wrapped[:1] == [bos] and plain[:1] != [bos]
    found[f"{KEY}add_eos_token"] = eos is not None and wrapped[-1:] == [eos] and plain[-1:] != [eos]
    if ends := sorted(tokenizer.eos_token_ids - {eos}):
        found[f"{KEY}eot_token_id"] = ends[0]
    return found


def _check(keys: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Say so when the file's tokenizer will cut text otherwise than the model's own."""
    written = gguf_tokenizer(keys)
    wanted = tokenizer.encode(PROBE, add_special=False)
    if written is None or written.encode(PROBE, add_special=False) != wanted:
        log.warning(
            "the tokenizer of the GGUF file (%s) does not cut every text as the model's own does: GGUF has "
            "no name for its way of splitting words, and replies will be worse",
            keys.get(f"{KEY}pre", keys[f"{KEY}model"]),
        )
