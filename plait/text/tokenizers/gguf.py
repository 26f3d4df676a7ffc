"""The tokenizer inside a GGUF file, from its metadata alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from plait.errors import BadFile, UnsupportedFormat
from plait.text.tokenizers.hf import HfEngine
from plait.text.tokenizers.patterns import PATTERNS, Pattern
from plait.text.tokenizers.plamo import PlamoEngine
from plait.text.tokenizers.rwkv import RwkvEngine
from plait.text.tokenizers.spm import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Pieces, SpmEngine
from plait.text.tokenizers.tokenizer import (
    Special,
    SpecialTokens,
    TextTokenizer,
    TokenizerBackend,
    end_of_generation,
)

_KEY = "tokenizer.ggml."
_OTHER_KINDS = {"bert": "WordPiece", "t5": "Unigram", "none": "no tokenizer"}
_NO_WAY = "give another vocabulary with --vocab (a tokenizer.json of the model)"


def gguf_tokenizer(metadata: Mapping[str, object]) -> TextTokenizer | None:
    """The tokenizer that a GGUF file's metadata describes; None when it describes none.

    Raises UnsupportedFormat for a kind or a `tokenizer.ggml.pre` that is not known, BadFile for lists that
    contradict each other.
    """
    model = metadata.get(f"{_KEY}model")
    if model is None or f"{_KEY}tokens" not in metadata:
        return None
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    if model == "gemma4":
        return _gemma(metadata)
    if model == "plamo2":
        return _plamo(metadata)
    if model == "rwkv":
        return _rwkv(metadata)
    kind = _OTHER_KINDS.get(str(model), "not a known kind")
    raise UnsupportedFormat(
        f"tokenizer.ggml.model {model!r} ({kind}) is not supported; known: gemma4, gpt2, llama, plamo2, "
        f"rwkv. Else {_NO_WAY}"
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens. Raises BadFile when their numbers differ or a text occurs twice."""
    tokens = [str(t) for t in _list(metadata, "tokens")]
    kinds = [int(k) for k in _list(metadata, "token_type") or [NORMAL] * len(tokens)]
    if len(kinds) != len(tokens):
        raise BadFile(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise BadFile(f"tokenizer.ggml.tokens holds {twice!r} twice; an id would never be produced")
    return tokens, kinds


def _list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    """A list of the metadata, or an empty one. Raises BadFile for anything else."""
    value = metadata.get(f"{_KEY}{key}")
    if value is not None and (isinstance(value, str | bytes) or not isinstance(value, Sequence)):
        raise BadFile(f"tokenizer.ggml.{key} is {type(value).__name__}, not a list")
    return value or ()


def _odd(kinds: Sequence[int]) -> list[int]:
    """The ids that are not ordinary tokens, which are few."""
    return [i for i, kind in enumerate(kinds) if kind != NORMAL]


def _byte_level(metadata: Mapping[str, object]) -> TextTokenizer:
    name, pattern = _pattern(metadata)
    tokens, kinds = _tokens(metadata)
    library = _library(metadata, tokens, kinds)
    unused = frozenset(i for i in _odd(kinds) if kinds[i] == UNUSED)
    engine = HfEngine(library, unused, range(len(tokens)))
    return _assemble(f"gguf:gpt2/{name}", engine, metadata, (tokens, kinds), pattern.add_bos)


def byte_level_library(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    """A gpt2 vocabulary as the `tokenizers` library has it. Raises BadFile, UnsupportedFormat."""
    return _library(metadata, *_tokens(metadata))


def _library(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    _, pattern = _pattern(metadata)
    if metadata.get(f"{_KEY}add_space_prefix"):
        raise UnsupportedFormat(
            f"tokenizer.ggml.add_space_prefix with a gpt2 vocabulary is not supported; {_NO_WAY}"
        )
    library = tokenizers.Tokenizer(_bpe(tokens, metadata, pattern.whole_words))
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(regex), "isolated", invert=False) for regex in pattern.splits
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    library.decoder = decoders.ByteLevel()
    _add_special(library, tokens, kinds)
    return library


def _add_special(library: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tell the library which tokens are never made by merging."""
    library.add_tokens(
        [
            tokenizers.AddedToken(tokens[i], special=kinds[i] == CONTROL, normalized=False)
            for i in _odd(kinds)
            if kinds[i] in (CONTROL, USER_DEFINED)
        ]
    )


def _gemma(metadata: Mapping[str, object]) -> TextTokenizer:
    """Gemma 4: merges over whole texts, `▁` for spaces, `<0x41>` for a byte of an unknown character."""
    tokens, kinds = _tokens(metadata)
    model = _bpe(tokens, metadata, whole_words=False)
    unknown = next((tokens[i] for i in _odd(kinds) if kinds[i] == UNKNOWN), None)
    model.byte_fallback, model.fuse_unk, model.unk_token = True, True, unknown
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_special(library, tokens, kinds)
    unused = frozenset(i for i in _odd(kinds) if kinds[i] == UNUSED)
    engine = HfEngine(library, unused, range(len(tokens)))
    return _assemble("gguf:gemma4", engine, metadata, (tokens, kinds), add_bos=True)


def _pattern(metadata: Mapping[str, object]) -> tuple[str, Pattern]:
    name = metadata.get(f"{_KEY}pre")
    if name is None:
        raise UnsupportedFormat(
            "tokenizer.ggml.pre is missing: the file does not say how its vocabulary cuts text into words, "
            f"and an assumed way gives wrong ids; {_NO_WAY}"
        )
    pattern = PATTERNS.get(str(name))
    if pattern is None:
        raise UnsupportedFormat(
            f"tokenizer.ggml.pre {name!r} is not known; known: {', '.join(sorted(PATTERNS))}. Else {_NO_WAY}"
        )
    return str(name), pattern


def _bpe(tokens: Sequence[str], metadata: Mapping[str, object], whole_words: bool) -> models.BPE:
    merges = _list(metadata, "merges")
    if f"{_KEY}merges" not in metadata or metadata[f"{_KEY}merges"] is None:
        raise BadFile("tokenizer.ggml.merges is missing: a gpt2 vocabulary cannot be used without its merges")
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    for i, (left, right) in enumerate(pairs):
        if not (left and right):
            raise BadFile(f"tokenizer.ggml.merges: {merges[i]!r} is not two tokens with a space between them")
    try:
        return models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=whole_words)
    except Exception as error:  # the library raises bare Exception
        raise BadFile(f"tokenizer.ggml.merges do not fit its tokens: {error}") from error


def _scores(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    scores = [float(s) for s in _list(metadata, "scores")]
    if len(scores) != len(tokens):
        raise BadFile(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    return scores


def _plamo(metadata: Mapping[str, object]) -> TextTokenizer:
    tokens, kinds = _tokens(metadata)
    engine = PlamoEngine(Pieces(tokens, _scores(metadata, tokens), kinds, space_first=False))
    return _assemble("gguf:plamo2", engine, metadata, (tokens, kinds), add_bos=False)


def _rwkv(metadata: Mapping[str, object]) -> TextTokenizer:
    """An empty line ends a turn, where the file says so. It is an ordinary token of texts all the same."""
    tokens, kinds = _tokens(metadata)
    engine = RwkvEngine(tokens, kinds)
    named = {key: i for key in ("eos", "eot", "eom") if (i := _id(metadata, key, len(tokens))) is not None}
    turns = frozenset(i for i in named.values() if engine.has_token(i))
    control = [key for key, i in named.items() if i not in turns]
    found = _assemble("gguf:rwkv", engine, metadata, (tokens, kinds), add_bos=False, ends=control)
    return found.with_ends(turns) if turns else found


def _sentencepiece(metadata: Mapping[str, object]) -> TextTokenizer:
    tokens, kinds = _tokens(metadata)
    scores = _scores(metadata, tokens)
    space_first = bool(metadata.get(f"{_KEY}add_space_prefix", True))
    engine = SpmEngine(Pieces(tokens, scores, kinds, space_first))
    return _assemble("gguf:llama", engine, metadata, (tokens, kinds), add_bos=True, space_first=space_first)


def _assemble(
    name: str,
    engine: TokenizerBackend,
    metadata: Mapping[str, Any],
    listed: tuple[Sequence[str], Sequence[int]],
    add_bos: bool,
    space_first: bool = False,
    ends: Sequence[str] = ("eos", "eot", "eom"),
) -> TextTokenizer:
    tokens, kinds = listed
    odd = _odd(kinds)
    by_kind = [Special(i, tokens[i]) for i in odd if kinds[i] in (CONTROL, UNKNOWN)]
    last = {i for key in ends if (i := _id(metadata, key, len(tokens))) is not None}
    bos, eos = _id(metadata, "bos", len(tokens)), _id(metadata, "eos", len(tokens))
    # A file may list its end-of-turn token as ordinary; it would then be shown and never end anything.
    known = {s.id for s in by_kind}
    control = [*by_kind, *(Special(i, tokens[i]) for i in sorted(last - known))]
    user = [Special(i, tokens[i]) for i in odd if kinds[i] == USER_DEFINED]
    add_bos = metadata.get(f"{_KEY}add_bos_token", add_bos)
    add_eos = metadata.get(f"{_KEY}add_eos_token", False)
    return TextTokenizer(
        name=name,
        engine=engine,
        specials=SpecialTokens(control),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(last) | end_of_generation(control, user),
        before=(bos,) if add_bos and bos is not None else (),
        after=(eos,) if add_eos and eos is not None else (),
        strips_first_space=space_first,
        space_after_special=space_first,
    )


def _id(metadata: Mapping[str, Any], which: str, size: int) -> int | None:
    key = f"{_KEY}{which}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not 0 <= int(token_id) < size:
        raise BadFile(f"{key} is {token_id}, outside the {size} tokens of the file")
    return int(token_id)
