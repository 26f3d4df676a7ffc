"""The tokenizer and chat template of a GGUF file as the files that transformers reads."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from plait.convert.gguf.vocabulary import KEY, PROBE
from plait.convert.plan.output import TEMPLATES
from plait.errors import BadFile
from plait.text.load import template_sources
from plait.text.tokenizers import rwkv
from plait.text.tokenizers.gguf import byte_level_library, gguf_tokenizer
from plait.text.tokenizers.gguf_files import FILES, GENERATION, TOKENIZER
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.spm import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # of a template


def write_vocabulary(folder: Path, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json and the template, into a folder."""
    if TOKENIZER in metadata:
        for key, name in FILES.items():
            if key in metadata:
                _write_text(folder / name, metadata[key])
    elif metadata.get(f"{KEY}model") == "rwkv":
        _write_rwkv(folder, metadata, tokenizer)
    elif not _write_library(folder, metadata, tokenizer):
        log.warning("no tokenizer is carried along: the GGUF file has none that a tokenizer.json can hold")
    _write_templates(folder, metadata)
    if GENERATION in metadata:
        _write_text(folder / "generation_config.json", metadata[GENERATION])
        return
    ends = sorted(tokenizer.eos_token_ids)
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends if ends else None}
    _write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _write_library(folder: Path, metadata: Mapping[str, object], tokenizer: Tokenizer) -> bool:
    """tokenizer.json and its config; False for a kind that they cannot hold."""
    library = _library(metadata)
    if library is None:
        return False
    config = _config(metadata, tokenizer)
    _wrap(library, tokenizer)
    library.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", config)
    _check(folder, config, tokenizer)
    return True


def _write_rwkv(folder: Path, metadata: Mapping[str, object], tokenizer: Tokenizer) -> None:
    """RWKV's own file, a line `id literal length` for each token but the first, which other files name."""
    ids = (i for i in range(1, tokenizer.vocab_size) if not tokenizer.is_hole(i))
    tokens = {i: tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids}
    lines = [f"{i} {_as_literal(token)} {len(token)}\n" for i, token in tokens.items()]
    _write_text(path := folder / rwkv.FILE, "".join(lines))
    config = {k: v for k, v in _config(metadata, tokenizer).items() if k.startswith("add_")}
    _write_json(folder / "tokenizer_config.json", config)
    added = {tokenizer.token_text(0): 0}
    _write_json(folder / "added_tokens.json", added)
    written = gguf_tokenizer(rwkv.rwkv_metadata(path, config, added))
    if written is None or written.special_ids != tokenizer.special_ids:
        log.warning("%s has a place for token 0 alone among those that no text has", rwkv.FILE)
    elif written.encode(PROBE) != tokenizer.encode(PROBE):
        log.warning("%s does not cut every text as the GGUF file's tokenizer does", rwkv.FILE)


def _as_literal(token: bytes) -> str:
    """A text as Python writes it, or bytes that are none."""
    try:
        return repr(token.decode())
    except UnicodeDecodeError:
        return repr(token)


def _write_templates(folder: Path, metadata: Mapping[str, object]) -> None:
    named = template_sources(None, metadata)
    if "default" in named:
        _write_text(folder / "chat_template.jinja", named.pop("default"))
    for name, text in named.items():
        if not _FILE_NAME.fullmatch(name):  # it is the file's word, and may say ../..
            log.warning("the chat template %s is left out: no file can be called so", ascii(name)[:80])
            continue
        (folder / TEMPLATES).mkdir(exist_ok=True)
        _write_text(folder / TEMPLATES / f"{name}.jinja", text)


def _write_text(path: Path, text: str) -> None:
    """The same bytes that the GGUF file has."""
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _library(metadata: Mapping[str, object]) -> tokenizers.Tokenizer | None:
    metadata = _drop_padding(metadata)
    match metadata.get(f"{KEY}model"):
        case "gpt2":
            return byte_level_library(metadata)
        case "llama":
            return _sentencepiece(metadata)
        case _:
            return None


def _drop_padding(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the names of rows that no token has at the end ([PAD317]), which would become tokens' texts."""
    kinds = metadata.get(f"{KEY}token_type") or []
    count = len(kinds)
    while count and kinds[count - 1] == UNUSED:
        count -= 1
    lists = (f"{KEY}{kind}" for kind in ("tokens", "token_type", "scores"))
    return (
        {**metadata, **{key: metadata[key][:count] for key in lists if key in metadata}}
        if kinds
        else metadata
    )


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's pieces as byte-pair merges: whatever makes a better piece is merged first."""
    tokens, scores = [str(t) for t in metadata[f"{KEY}tokens"]], metadata[f"{KEY}scores"]
    kinds = metadata.get(f"{KEY}token_type") or [NORMAL] * len(tokens)
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    try:
        library = tokenizers.Tokenizer(
            models.BPE(
                {t: i for i, t in enumerate(tokens)},
                _merges(tokens, scores, kinds),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=BYTE in kinds,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise BadFile(f"tokenizer.ggml.tokens make no vocabulary: {error}") from error
    space_first = bool(metadata.get(f"{KEY}add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_first else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space_first else [])])
    library.add_tokens(
        [
            tokenizers.AddedToken(text, special=kind != USER_DEFINED, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )
    return library


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    known = {t for t, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    results = sorted((i for i, kind in enumerate(kinds) if kind == NORMAL), key=lambda i: -scores[i])
    return [
        (tokens[i][:at], tokens[i][at:])
        for i in results
        for at in range(1, len(tokens[i]))
        if tokens[i][:at] in known and tokens[i][at:] in known
    ]


def _config(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = metadata[f"{KEY}tokens"]
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unk", "pad"):
        token_id = metadata.get(f"{KEY}{name}_token_id", metadata.get(f"{KEY}{name}ding_token_id"))
        if name == "unk":
            token_id = metadata.get(f"{KEY}unknown_token_id", token_id)
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = str(tokens[token_id])
    plain, wrapped = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    config["add_bos_token"] = wrapped[0] == tokenizer.bos_token_id != plain[0]
    config["add_eos_token"] = wrapped[-1] == tokenizer.eos_token_id != plain[-1]
    return config | {
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _wrap(library: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """Tokens before and after every text, as the library's post-processor."""
    plain, wrapped = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    if wrapped == plain:
        return
    start = next(n for n in range(len(wrapped)) if wrapped[n : n + len(plain)] == plain)
    around = [*wrapped[:start], *wrapped[start + len(plain) :]]
    named = {i: str(library.id_to_token(i)) for i in around}
    before = " ".join(named[i] for i in wrapped[:start])
    after = " ".join(named[i] for i in wrapped[start + len(plain) :])
    library.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, (before, "$A", after))),
        pair=" ".join(filter(None, (before, "$A", after, before, "$B", after))),
        special_tokens=[(text, i) for i, text in named.items()],
    )


def _check(folder: Path, config: Mapping[str, object], tokenizer: Tokenizer) -> None:
    written = load_hf_tokenizer(folder / "tokenizer.json", TokenizerFiles(config, {}))
    if written.encode(PROBE) != tokenizer.encode(PROBE):
        log.warning("tokenizer.json does not cut every text as the GGUF file's tokenizer does")
