"""A model's tokenizer and chat template as GGUF metadata."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import BadFile, UnsupportedFormat
from plait.loading.open_model import Opened
from plait.text.load import template_sources
from plait.text.tokenizers import rwkv
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.gguf_files import CARRIED, FILES, GENERATION, TOKENIZER
from plait.text.tokenizers.patterns import PATTERNS
from plait.text.tokenizers.plamo import plamo_metadata
from plait.text.tokenizers.sentencepiece_file import sentencepiece_metadata
from plait.text.tokenizers.spm import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
KEY = "tokenizer.ggml."
NONE = "no_vocab"  # as llama.cpp calls it
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tokenizer.jsonl", rwkv.FILE)
USUAL = ("llama-bpe", "smollm")  # of several names for the same, the one that most files have
# Every class of character that the known vocabularies cut at, and what they treat apart.
PROBE = (
    "Hello, world!  It's 2024-11-21; I'd say she'LL don't.\n\n\tdef f(x):\r\n    return x**2 + 3.14  # ok\n"
    "Ünïcödé straße ÇA ñandú — “quotes” … 日本語のテキスト 한국어 русский язык עברית हिन्दी 1234567890\n"
    "a_b-c/d\\e @user #tag $9.99 100% 🙂🙃👩‍👩‍👧 CamelCaseWORDS x²≤y  \n \n   trailing   "
)


def vocabulary_keys(opened: Opened, *, is_own: bool = False) -> dict[str, object]:
    """The `tokenizer.` keys of a file of this model.

    Where GGUF's words do not cut text as the model does, or there are none, the file carries tokenizer.json.
    Plait reads that first. is_own: only Plait reads the file anyway.
    """
    metadata, named_files = opened.metadata, find_vocabulary(opened)
    if metadata and not named_files and (f"{KEY}model" in metadata or TOKENIZER in metadata):
        return {key: metadata[key] for key in metadata if key.startswith(CARRIED)}
    directory, tokenizer = named_files or opened.text_directory, readable_tokenizer(opened)
    if tokenizer is None or directory is None or not _has_files(directory):
        log.warning("no tokenizer is carried along: the model has none in a file that is converted")
        return {f"{KEY}model": NONE, **_templates(opened), **_generation(opened)}
    said = (
        {}
        if is_own and (directory / "tokenizer.json").exists()
        else _collect_keys(opened, directory, tokenizer)
    )
    keys = said or {f"{KEY}model": NONE, **read_carried_files(directory)}
    return keys | _templates(opened) | _generation(opened)


def find_vocabulary(opened: Opened) -> Path | None:
    """Where the files lie of the vocabulary that --vocab names; None without it, or without files."""
    if opened.config.vocab is None:
        return None
    path = Path(opened.config.vocab)
    directory = path if path.is_dir() else path.parent if path.name in VOCABULARIES else None
    return directory if directory and _has_files(directory) else None


def readable_tokenizer(opened: Opened) -> Tokenizer | None:
    """The model's tokenizer; None, and a word, for one of a kind that Plait does not read."""
    try:
        return opened.tokenizer()
    except UnsupportedFormat as error:
        log.warning("%s", error)
        return None


def _collect_keys(opened: Opened, directory: Path, tokenizer: Tokenizer) -> dict[str, object]:
    """The vocabulary in GGUF's words; {} if it has none for it."""
    size = opened.resolved.spec.vocab_size
    keys = _from_files(directory, tokenizer, size)
    if not keys:
        log.warning("llama.cpp has no vocabulary of this kind: only Plait finds one in the file")
        return {}
    keys |= {key: value for key, value in _ids(tokenizer).items() if not _is_beyond(value, size)}
    if not _cuts_alike(keys, tokenizer):
        log.warning(
            "llama.cpp will not cut every text as this tokenizer (%s) does, it has no name for its way of "
            "splitting words, and replies will be worse there",
            keys.get(f"{KEY}pre", keys[f"{KEY}model"]),
        )
        keys |= read_carried_files(directory)
    return keys


def read_carried_files(directory: Path) -> dict[str, str]:
    """tokenizer.json and the files next to it, as text, under the keys that Plait reads."""
    found = {key: directory / name for key, name in FILES.items() if (directory / name).exists()}
    return (
        {key: path.read_text(encoding="utf-8") for key, path in found.items()} if TOKENIZER in found else {}
    )


def _templates(opened: Opened) -> dict[str, str]:
    """The chat template, and others that have names."""
    key, named = "tokenizer.chat_template", template_sources(opened.text_directory, opened.metadata)
    return {key if name == "default" else f"{key}.{name}": text for name, text in named.items()}


def _generation(opened: Opened) -> dict[str, str]:
    """generation_config.json, if there is one: what ends a reply, and how it is sampled."""
    if opened.metadata and GENERATION in opened.metadata:
        return {GENERATION: opened.metadata[GENERATION]}
    directory = opened.text_directory
    path = None if directory is None else directory / "generation_config.json"
    return {GENERATION: path.read_text(encoding="utf-8")} if path and path.exists() else {}


def _is_beyond(value: object, size: int) -> bool:
    """Whether this is the id of a token that the model has no row for."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= size


def _has_files(directory: Path) -> bool:
    return any((directory / name).exists() for name in VOCABULARIES)


def _from_files(directory: Path, tokenizer: Tokenizer, size: int) -> dict[str, object]:
    path = directory / "tokenizer.json"
    if not path.exists():
        return _pad_tokens(_other_files(directory), size)
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        model = description["model"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadFile(f"{path}: not a tokenizer.json ({error})") from error
    if model.get("type") != "BPE":
        return {}
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
    return _pad_tokens(keys, size)


def _other_files(directory: Path) -> dict[str, object]:
    """SentencePiece's own file, or RWKV's, or PLaMo's."""
    if (directory / "tokenizer.model").exists():
        return sentencepiece_metadata(directory / "tokenizer.model")
    config, added = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for path in (directory / "tokenizer_config.json", directory / "added_tokens.json")
    )
    if (path := directory / rwkv.FILE).exists():
        return rwkv.rwkv_metadata(path, config, added)
    return plamo_metadata(directory / "tokenizer.jsonl", config)


def _tokens(description: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    """Texts and kinds by id; ids that no token has are holes."""
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


def _pad_tokens(keys: dict[str, Any], size: int) -> dict[str, Any]:
    """As many tokens as the model has rows: holes for rows without one, none for tokens without a row."""
    tokens = keys[f"{KEY}tokens"]
    missing = range(len(tokens), size)
    filled: dict[str, list[object]] = {
        "tokens": [f"[PAD{i}]" for i in missing],
        "token_type": [UNUSED] * len(missing),
        "scores": [0.0] * len(missing),
    }
    for kind, more in filled.items():
        if f"{KEY}{kind}" in keys:
            keys[f"{KEY}{kind}"] = [*keys[f"{KEY}{kind}"], *more][:size]
    if len(tokens) > size:
        log.warning("the last %d tokens are left out, for which the model has no rows", len(tokens) - size)
        known = set(tokens[:size])
        merges = keys.get(f"{KEY}merges", [])
        keys[f"{KEY}merges"] = [m for m in merges if {*m.split(" "), m.replace(" ", "")} <= known]
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
    """A regular expression in one spelling of those that mean the same."""
    plain = re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda m: chr(int(m[1], 16)), regex)
    return plain.replace(r"\/", "/")


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of the tokens that begin and end a text."""
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


def _cuts_alike(keys: Mapping[str, object], tokenizer: Tokenizer) -> bool:
    """Whether the file's tokenizer makes of a text what the model's own does."""
    written = gguf_tokenizer(keys)
    wanted = tokenizer.encode(PROBE, add_special=False)
    return written is not None and written.encode(PROBE, add_special=False) == wanted
