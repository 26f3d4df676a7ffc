"""Finds the tokenizer and the chat template that belong to a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.errors import BadFile, ConfigError, UnsupportedFormat
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.markers import FORMATS, MarkerTemplate
from plait.text.chat.tekken import TekkenTemplate
from plait.text.chat.template import ChatTemplate
from plait.text.chat.template_file import read_template_file
from plait.text.tokenizers import gguf_files, rwkv
from plait.text.tokenizers.builtin import builtin_tokenizer, tiktoken_tokenizer
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, hf_tokenizer, load_hf_tokenizer, read_special_tokens
from plait.text.tokenizers.plamo import plamo_metadata
from plait.text.tokenizers.sentencepiece_file import sentencepiece_metadata
from plait.text.tokenizers.tekken import TEKKEN, VERSIONS, is_tekken, read_tekken_head, tekken_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer, Tokenizer
from plait.text.tokenizers.vocabularies import BUILTIN, detect_vocabulary

log = logging.getLogger("plait")
_UNREADABLE = {
    "vocab.json": "vocab.json and merges.txt",
    "vocab.txt": "WordPiece",
}

# What is raised when a value in a file is of another kind than its readers expect.
_FAULTS = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError)
_WRITE = "write a tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained)"


def load_tokenizer(
    *,
    directory: Path | None = None,
    metadata: Mapping[str, object] | None = None,
    vocab: str | None = None,
    vocab_size: int = 0,
    config: Mapping[str, object] | None = None,
    oxidizr: bool = False,
) -> TextTokenizer | None:
    """The tokenizer of a model; None when none is found (token ids still work everywhere).

    In this order: `vocab` (`--vocab`: a built-in name, a tokenizer.json, tokenizer.model, tekken.json,
    .tiktoken or directory), tokenizer.json, the GGUF file's own (`metadata`), tokenizer.model, tekken.json,
    the config's `tokenizer_vocab`, the built-in vocabulary of the size `vocab_size`. Its `name` shows which
    it was.
    """
    config = config or {}
    with _blame_files("tokenizer", directory):
        tokenizer = _find(directory, metadata, vocab, oxidizr)
        if tokenizer is None:
            name = config.get("tokenizer_vocab") or detect_vocabulary(vocab_size)
            tokenizer = builtin_tokenizer(str(name), oxidizr) if name else None
        if tokenizer is None:
            return None
        ends = _eos_ids(load_generation_config(directory, metadata)) | _eos_ids(config)
        return tokenizer.with_ends(frozenset(i for i in ends if not tokenizer.is_hole(i)))


@contextmanager
def _blame_files(what: str, directory: Path | None) -> Iterator[None]:
    """Raises BadFile for values of a wrong kind, because the file is at fault."""
    try:
        yield
    except _FAULTS as error:
        shown, where = " ".join(str(error).split())[:160], f" in {directory}" if directory is not None else ""
        raise BadFile(
            f"the {what}'s files{where} have values that cannot be read ({type(error).__name__}: {shown}); "
            "--debug shows where, and --vocab and --chat-template name others"
        ) from error


def _find(
    directory: Path | None, metadata: Mapping[str, object] | None, vocab: str | None, oxidizr: bool
) -> TextTokenizer | None:
    if vocab is not None:
        return _load_named(vocab, oxidizr)
    if directory is not None and (directory / "tokenizer.json").exists():
        return _from_files(directory)
    found = (_load_carried(metadata) or gguf_tokenizer(metadata)) if metadata else None
    return found or (_from_files(directory) if directory is not None else None)


def _load_carried(metadata: Mapping[str, object]) -> TextTokenizer | None:
    """The tokenizer.json that a GGUF file has in its metadata, if it has one."""
    if gguf_files.TOKENIZER not in metadata:
        return None
    text = str(metadata[gguf_files.TOKENIZER])
    return hf_tokenizer(
        text, "tokenizer.json", f"GGUF metadata {gguf_files.TOKENIZER}", _read_metadata(metadata)
    )


def _read_metadata(metadata: Mapping[str, object]) -> TokenizerFiles:
    """The tokenizer's JSON files that a GGUF file has in its metadata."""
    config, special = (_json_in(metadata, key) for key in (gguf_files.CONFIG, gguf_files.SPECIAL))
    return TokenizerFiles(config, special)


def _load_named(vocab: str, oxidizr: bool) -> TextTokenizer:
    """What `--vocab` names."""
    if vocab in BUILTIN:
        return builtin_tokenizer(vocab, oxidizr)
    name, _, pattern = vocab.rpartition("@") if not Path(vocab).exists() and "@" in vocab else (vocab, "", "")
    path = Path(name)
    if path.is_dir():
        found = _from_files(path)
        if found:
            return found
    elif path.suffix == ".tiktoken" and path.exists():
        return tiktoken_tokenizer(path, pattern or None, oxidizr)
    elif is_tekken(path) and path.exists():
        return tekken_tokenizer(path)
    elif path.suffix == ".json" and path.exists():
        return load_hf_tokenizer(path, _files(path.parent))
    elif path.suffix == ".model" and path.exists():
        return _sentencepiece(path)
    elif path.name == rwkv.FILE and path.exists():
        return _rwkv(path)
    raise ConfigError(
        f"vocab: {vocab!r} is neither a built-in vocabulary ({', '.join(BUILTIN)}) nor a tokenizer.json, "
        "tokenizer.model, tekken.json or .tiktoken file, nor a directory with one"
    )


def _from_files(directory: Path) -> TextTokenizer | None:
    """The tokenizer in a model's directory. Raises UnsupportedFormat when there is one we cannot read."""
    if (directory / "tokenizer.json").exists():
        return load_hf_tokenizer(directory / "tokenizer.json", _files(directory))
    if (directory / "tokenizer.model").exists():
        return _sentencepiece(directory / "tokenizer.model")
    if (directory / "tokenizer.jsonl").exists():
        return _plamo(directory / "tokenizer.jsonl")
    if (directory / TEKKEN).exists():
        return tekken_tokenizer(directory / TEKKEN)
    if (directory / rwkv.FILE).exists():
        return _rwkv(directory / rwkv.FILE)
    for name, kind in _UNREADABLE.items():
        if (directory / name).exists():
            raise UnsupportedFormat(
                f"{directory / name}: a vocabulary in the form of {kind} is not supported; {_WRITE}, "
                "or name another with --vocab"
            )
    return None


def _sentencepiece(path: Path) -> TextTokenizer:
    """A tokenizer.model, with BOS and EOS as tokenizer_config.json next to it sets them."""
    added = path.parent / "added_tokens.json"
    if added.exists():
        raise UnsupportedFormat(f"{added}: tokens added to a tokenizer.model are not supported; {_WRITE}")
    metadata, config = sentencepiece_metadata(path), _json(path.parent / "tokenizer_config.json")
    for key in ("add_bos_token", "add_eos_token"):
        if config.get(key) is not None:
            metadata[f"tokenizer.ggml.{key}"] = config[key]
    return _load_pieces(metadata, path)


def _plamo(path: Path) -> TextTokenizer:
    """PLaMo 2's tokenizer.jsonl, with BOS and EOS as tokenizer_config.json next to it sets them."""
    return _load_pieces(plamo_metadata(path, _json(path.parent / "tokenizer_config.json")), path)


def _rwkv(path: Path) -> TextTokenizer:
    """RWKV's list of tokens, with what the JSON files next to it say."""
    files = (_json(path.parent / name) for name in ("tokenizer_config.json", "added_tokens.json"))
    return _load_pieces(rwkv.rwkv_metadata(path, *files), path)


def _load_pieces(metadata: Mapping[str, object], path: Path) -> TextTokenizer:
    tokenizer = gguf_tokenizer(metadata)
    if tokenizer is None:
        raise BadFile(f"{path}: a vocabulary without a piece")
    return replace(tokenizer, name=path.name)


def load_generation_config(
    directory: Path | None, metadata: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """generation_config.json of a model's directory, or in a GGUF file's metadata; {} if it has none."""
    if directory is not None:
        return _json(directory / "generation_config.json")
    return _json_in(metadata or {}, gguf_files.GENERATION)


def load_chat_template(
    *,
    directory: Path | None = None,
    metadata: Mapping[str, object] | None = None,
    option: str | None = None,
    tokenizer: Tokenizer | None = None,
    oxidizr: bool = False,
) -> ChatTemplate | None:
    """The chat template of a model; None when it has none.

    In this order: `option` (`--chat-template`: a file, or oxidizr, blazr, chatml), chat_template.jinja,
    tokenizer_config.json, chat_template.json, the GGUF file's. Without any, a model with tekken.json has the
    format of its version, and one in oxidizr's format that which it was trained on. Raises ConfigError for an
    option that cannot be honoured.
    """
    metadata = metadata or {}
    with _blame_files("chat template", directory):
        if tokenizer is None:
            if option is not None:
                raise ConfigError(
                    f"chat_template: {option!r} needs a tokenizer, and none was found; give --vocab"
                )
            return None
        if option in FORMATS:
            return MarkerTemplate(str(option), tokenizer)
        name, sources = _sources(directory, metadata, option)
        if sources:
            return JinjaTemplate(name, sources, tokenizer, _variables(directory, metadata, tokenizer))
        if directory is not None and (directory / TEKKEN).exists():
            return _tekken_template(directory / TEKKEN, tokenizer)
        if oxidizr and tokenizer.token_id("<|assistant|>") in tokenizer.special_ids:
            return MarkerTemplate("oxidizr", tokenizer)
        return None


def _tekken_template(path: Path, tokenizer: Tokenizer) -> TekkenTemplate | None:
    """The chat format of a tekken.json's version; None, with a warning, for one that cannot be written."""
    head = read_tekken_head(path)
    if (version := head.config.version) not in VERSIONS:
        log.warning("no chats: %s has the version %.20r, known are %s", path, version, ", ".join(VERSIONS))
        return None
    template = TekkenTemplate(head, tokenizer)
    if template.missing:
        lacks = ", ".join(template.missing)
        log.warning("no chats: %s lacks %s of %s", tokenizer.name, lacks, template.name)
        return None
    return template


def template_sources(directory: Path | None, metadata: Mapping[str, object] | None) -> dict[str, str]:
    """The Jinja sources of a model's chat template by name, "default" being the usual; {} if it has none."""
    return _sources(directory, metadata or {}, None)[1]


def _sources(
    directory: Path | None, metadata: Mapping[str, object], option: str | None
) -> tuple[str, dict[str, str]]:
    """(where from, part name → Jinja source)."""
    if option is not None:
        return option, {"default": read_template_file(option)}
    if directory is not None:
        file = directory / "chat_template.jinja"
        if file.exists():
            more = {
                f.stem: _text(f) for f in sorted((directory / "additional_chat_templates").glob("*.jinja"))
            }
            return file.name, {"default": _text(file), **more}
        found = _json(directory / "tokenizer_config.json").get("chat_template")
        if isinstance(found, str):
            return "tokenizer_config.json", {"default": found}
        if found:
            return "tokenizer_config.json", _name_parts(found, directory / "tokenizer_config.json")
        found = _json(directory / "chat_template.json").get("chat_template")  # of a processor of images
        if isinstance(found, str):
            return "chat_template.json", {"default": found}
        if (directory / rwkv.FILE).exists():
            return rwkv.FILE, {"default": rwkv.TEMPLATE}
    key = "tokenizer.chat_template"
    named = {k.removeprefix(f"{key}."): metadata[k] for k in metadata if k.startswith(f"{key}.")}
    usual = metadata.get(key)
    found = {"default": rwkv.TEMPLATE if usual == rwkv.TEMPLATE_NAME else usual, **named}
    return "the GGUF file", {name: source for name, source in found.items() if isinstance(source, str)}


def _name_parts(found: Any, path: Path) -> dict[str, str]:
    """Part name → source, from a list of {"name": …, "template": …}."""
    try:
        return {str(part["name"]): str(part["template"]) for part in found}
    except (TypeError, KeyError) as error:
        raise BadFile(f"{path}: chat_template is neither text nor a list of named templates") from error


def _variables(
    directory: Path | None, metadata: Mapping[str, object], tokenizer: Tokenizer
) -> dict[str, str]:
    """The special tokens that a template may write."""
    found = read_special_tokens(_read_metadata(metadata) if directory is None else _files(directory))
    if tokenizer.bos_token_id is not None:
        found.setdefault("bos_token", tokenizer.token_text(tokenizer.bos_token_id))
    if tokenizer.eos_token_id is not None:
        found.setdefault("eos_token", tokenizer.token_text(tokenizer.eos_token_id))
    return found


def _files(directory: Path) -> TokenizerFiles:
    config = _json(directory / "tokenizer_config.json")
    return TokenizerFiles(config, _json(directory / "special_tokens_map.json"))


def _eos_ids(config: Mapping[str, object]) -> frozenset[int]:
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return frozenset(i for i in listed if isinstance(i, int) and not isinstance(i, bool))


def _json(path: Path) -> dict[str, object]:
    """A JSON object; {} if there is no such file. Raises BadFile."""
    if not path.exists():
        return {}
    return _object(_text(path), str(path))


def _json_in(metadata: Mapping[str, object], key: str) -> dict[str, object]:
    """The same out of a GGUF file's metadata; numbers of any size, as transformers writes 10^30 for no limit.

    Raises BadFile.
    """
    text = metadata.get(key, "{}")
    if not isinstance(text, str):
        raise BadFile(f"GGUF metadata {key}: must be JSON as text, got {type(text).__name__}")
    return _object(text, f"GGUF metadata {key}")


def _object(text: str, where: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadFile(f"{where}: a JSON object was expected, found a {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}") from error
