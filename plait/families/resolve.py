"""The one entry: config, names and shapes of a checkpoint become a model as data, every number traced."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from plait.checkpoint.names import Source, UnknownName, make_derived, sources_of
from plait.errors import ConfigError, UnsupportedFormat, UnsupportedModel
from plait.families.common.inside import Inside, find_body
from plait.families.common.recipes import Shifted
from plait.families.common.refused import why_no_decoder
from plait.families.common.registry import Family, UnknownArchitecture, find, names_in
from plait.families.common.resolved import Resolved
from plait.families.config.aliases import ALIASES
from plait.families.config.blocks import list_block_keys
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.neutral import NEUTRAL
from plait.families.config.normalize import (
    FULL,
    LINEAR,
    NOTHING,
    ROPES,
    SHARE,
    SLIDING,
    Config,
    IncompleteConfig,
    Kind,
    flatten,
    normalize,
    reads_share,
)
from plait.families.config.reads import ReadConfig, as_unread
from plait.families.config.wrappers import NESTS, list_texts
from plait.families.detect.detect import HEADS, Shapes, infer_config, layer_kinds
from plait.families.gguf.config import gguf_config
from plait.families.gguf.effects import check_routers, check_scaling, check_windows
from plait.families.gguf.names import gguf_names
from plait.families.oxidizr.oxidizr import is_oxidizr, resolve_oxidizr
from plait.quant.weight import as_tensor

FILE, SET = "config.json", "--set"
UNEQUAL = "is not equal to"  # why a head is used that the config ties
PACKED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".absmax",
    ".SCB",
)
STATES = (LINEAR, "conv")  # words of layer_types
# Read where a model is used, not where its spec is built: by tokenizers, and by heads of scores and vectors.
LATER = {
    *("eos_token_id", "tokenizer_vocab", "classifier_from_token", "id2label", "problem_type"),
    *("sentence_transformers", "pooling_type"),
}


def resolve(
    config: Mapping[str, Any] | None,
    shapes: Shapes,
    *,
    read: Callable[[str], Tensor],
    gguf: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    ssm_mode: Literal["ssd", "exact"] = "ssd",
    a_source: Literal["auto", "trainer", "saved"] = "auto",
) -> Resolved:
    """What a checkpoint is. Raises UnsupportedModel, CheckpointError or ConfigError.

    config: its config.json, if any. shapes: every tensor, rows first. read: one tensor's numbers, called only
    where a number is part of what the model is. gguf: the metadata of a GGUF file. overrides: `key=value`
    with JSON values, which win over everything. ssm_mode and a_source: for oxidizr's checkpoints alone.
    """
    oxidizr = gguf is None and is_oxidizr(config, shapes.keys())
    if not oxidizr and (ssm_mode, a_source) != ("ssd", "auto"):
        option = f"ssm_mode {ssm_mode!r}" if ssm_mode != "ssd" else f"a_source {a_source!r}"
        raise ConfigError(f"{option} is for oxidizr checkpoints alone, and this is none; leave it out")
    if gguf is not None:
        with blame_config("the metadata"):
            return _resolve_gguf(gguf, shapes, read, overrides)
    with blame_config():
        if oxidizr:
            return resolve_oxidizr(
                config, shapes, read, ssm_mode=ssm_mode, a_source=a_source, overrides=overrides
            )
        return _resolve_tensors(config, shapes, read, overrides)


def _resolve_tensors(
    config: Mapping[str, Any] | None,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    overrides: Sequence[str],
) -> Resolved:
    own = flatten(config or NOTHING)
    _check_storage(shapes)
    given = dict(map(parse_override, overrides))
    every = _under_each_name(given, own)
    flat, why = own | every, dict.fromkeys(own, FILE) | dict.fromkeys(every, SET)
    if _is_known(flat):
        _check_instead(every, flat, find(flat))
    _tie(flat, why, shapes)
    kind = partial(ReadConfig, reads=set[str]()) if given else Config
    found = _complete(flat, why, shapes, partial(_build_with_head, shapes=shapes, read=read, kind=kind))
    return _check_read(found, given, own)


def _complete(
    flat: Mapping[str, object],
    why: dict[str, str],
    shapes: Shapes,
    build: Callable[[Mapping[str, object], dict[str, str]], Resolved],
) -> Resolved:
    """A config as far as it goes; names and shapes for the rest."""
    try:
        return build(flat, why)
    except (IncompleteConfig, UnknownArchitecture) as error:
        if "ssm_cfg" in flat or (names_in(flat) and not _is_known(flat)):
            raise
        missing = error
    named = {"architectures": find(flat).architectures[:1]} if _is_known(flat) else {}
    try:
        inferred, reasons = infer_config(shapes, {**flat, **named})
    except UnsupportedModel:
        if named:  # then it can be corrected by what the config lacks
            raise missing from None
        raise
    known = {k: v for k, v in flat.items() if v is not None or why[k] == SET}
    why = {**reasons, **{k: why[k] for k in known}}
    return replace(build({**inferred, **known}, why), is_detected=True)


def _check_storage(shapes: Shapes) -> None:
    """Refuse packed tensors that `quantized.packed` made no weights of, because alone they are noise."""
    if packed := next((name for name in shapes if name.endswith(PACKED)), None):
        raise UnsupportedFormat(
            f"the weights are quantized (tensor {packed}) in a way that is not read; read are GPTQ, AWQ, "
            "FP8, compressed-tensors, modelopt, bitsandbytes, MXFP4 and GGUF"
        )


def parse_override(text: str) -> tuple[str, Any]:
    """(key, value) of a `key=value`, the value as JSON. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: it is written key=value")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        raise ConfigError(f"--set {text}: {value!r} is not JSON (a word needs quotes: '\"word\"')") from None


def _under_each_name(given: Mapping[str, object], flat: Mapping[str, object]) -> dict[str, object]:
    """What was given, also under the other names that the config has for it, so that none of them wins."""
    found = dict(given)
    for ours, others in ALIASES.items():
        names = (ours, *others)
        for name in given.keys() & set(names):
            found |= {other: given[name] for other in names if other in flat and other not in given}
    return found


def _check_instead(given: Mapping[str, object], flat: Mapping[str, object], entry: Family) -> None:
    """Refuse keys of which a family reads another one in this config. Raises ConfigError."""
    blocks = list_block_keys(flat)
    for key in given.keys() - {"block_configs"}:
        other = "block_configs" if key in blocks else entry.hf.instead.get(key)
        if other and other not in given and flat.get(other, entry.defaults.get(other)) is not None:
            raise ConfigError(f"--set {key}=…: of this model {other} is read instead; set that")


def _check_read(found: Resolved, given: Mapping[str, object], own: Mapping[str, object]) -> Resolved:
    """Refuse overrides that nothing reads, as they would be ignored in silence. Raises ConfigError.

    given: by their keys. own: the config without them. The answer's config records nothing any more.
    """
    c = found.config
    if not isinstance(c, ReadConfig):
        return found
    why_no_decoder(c)
    plain = Config(c.items())  # of which no key is recorded
    entry, read = find(plain), {"architectures", "model_type", *c.reads}
    if "gguf_architecture" not in plain and not reads_share(entry.defaults, entry.honours):
        read -= {SHARE, "rotary_pct", *ALIASES[SHARE]}
    checked = NEUTRAL.keys() - set(entry.honours)  # another value than the neutral one was refused
    for key, value in given.items():
        is_true = key in checked or (key == SHARE and value in (None, 1))
        names = {n for n in _list_names(key) if value is None or found.provenance.get(n) == SET}
        if is_true or {key, *names} & (read | LATER):
            continue
        without = {**own, **{other: given[other] for other in given if other != key}}
        if not _is_refused(without, is_whole=not found.is_detected):
            raise as_unread(key, entry.name, read, _find_instead(key, read, own))
    return replace(found, config=plain)


def _list_names(key: str) -> set[str]:
    """All names of what a key says."""
    return next(({ours, *others} for ours, others in ALIASES.items() if key in (ours, *others)), {key})


def _is_refused(config: Mapping[str, object], *, is_whole: bool) -> bool:
    """Whether a config cannot be one, for a value that it has or (if it is whole) for one that it lacks."""
    try:
        with blame_config():
            _normalize_config(config, Config) if is_whole else check_named(config)
    except UnsupportedModel:
        return True
    return False


def _find_instead(key: str, read: Collection[str], own: Mapping[str, object]) -> str:
    """What to set instead of a key that is inside another one, or has others inside it; "" of other keys."""
    if key in NESTS:
        return "; a key inside it is set by its own name"
    parts = {
        k: part for k in (ROPES, "rope_scaling") if isinstance(part := own.get(k), Mapping) and k in read
    }
    around = next((k for k, part in parts.items() if key in part), None)
    return f"; {around} has it: --set '{around}={{…}}'" if around else ""


def _is_known(flat: Mapping[str, Any]) -> bool:
    try:
        find(flat)
    except UnknownArchitecture:
        return False
    return True


def _normalize_config(flat: Mapping[str, Any], kind: Kind) -> Config:
    entry = find(flat)
    check_named(flat)
    return normalize(flat, entry.defaults, entry.honours, entry.hf.words, kind)


def _tie(flat: dict[str, Any], why: dict[str, str], shapes: Shapes) -> None:
    """Without a head of its own a model is tied, whatever its config says."""
    if why.get("tie_word_embeddings") == SET or any(head in shapes for head in HEADS):
        return
    if not flat.get("tie_word_embeddings"):
        flat["tie_word_embeddings"], why["tie_word_embeddings"] = True, f"tensor {HEADS[0]} is not there"


def _build_with_head(
    flat: Mapping[str, object],
    why: dict[str, str],
    shapes: Shapes,
    read: Callable[[str], Tensor],
    kind: Kind,
) -> Resolved:
    """What a config and the tensors say; a head with numbers of its own wins over a config that ties it.

    So does `transformers`. A copy of the embedding changes nothing: the model stays tied.
    """
    built, told = _build_once(flat, shapes, why, kind)
    if not built.spec.tied or told.get("tie_word_embeddings") == SET:
        return built
    try:
        head, table = (built.names.resolve(name, shapes) for name in ("head.weight", "embed.weight"))
    except UnknownName:  # a model that gives vectors alone
        return built
    stored = [*sources_of(head[0]), *sources_of(table[0])]
    if not all(name in shapes for name in stored):
        return built
    if _are_equal(_read_source(*head, read), _read_source(*table, read)):
        return built
    told = {**why, "tie_word_embeddings": f"tensor {stored[0]} {UNEQUAL} {stored[-1]}"}
    return _build_once({**flat, "tie_word_embeddings": False}, shapes, told, kind)[0]


def _build_once(
    flat: Mapping[str, object], shapes: Shapes, why: Mapping[str, str], kind: Kind
) -> tuple[Resolved, dict[str, str]]:
    c, told = _normalize_config(flat, kind), dict(why)
    c.make("layer_types", lambda c: _let_tensors_win(c["layer_types"], told, shapes))
    built = _build_resolved(c, told)
    body = find_body(shapes)
    if body or list_texts(names_in(flat)):
        built = replace(built, names=Inside(built.names, body or ""))
    return built, told


def _read_source(source: Source, fields: Mapping[str, str], read: Callable[[str], Tensor]) -> Tensor:
    if isinstance(source, str):
        return read(source)
    return as_tensor(make_derived(source, [read(name) for name in source.sources], fields, "the head"))


def _are_equal(head: Tensor, table: Tensor) -> bool:
    """Whether two tables hold the same numbers; of most that differ, the first rows show it."""
    alike = (head.shape, head.dtype) == (table.shape, table.dtype)
    return alike and torch.equal(head[:8], table[:8]) and torch.equal(head, table)


def _let_tensors_win(kinds: list[str], why: dict[str, str], shapes: Shapes) -> list[str]:
    """Layer kinds from the tensors, which show what attends; a config that says otherwise is wrong."""
    if why.get("layer_types") == SET or "hybrid" in kinds:
        return kinds
    attends = next((word for word in kinds if word in (FULL, SLIDING)), FULL)
    for i, (kind, name) in sorted(layer_kinds(shapes).items()):
        if i >= len(kinds) or _sort(said := kinds[i]) == _sort(kind):
            continue
        kinds[i] = kind if kind in STATES else attends
        if "; config.json says" not in why.get("layer_types", ""):
            why["layer_types"] = f"tensor {name}; config.json says layer {i} is {said}"
    return kinds


def _sort(kind: str) -> str:
    """A word of `layer_types`; all attention counts as one, with or without a window."""
    return kind if kind in STATES else FULL


def _build_resolved(c: Config, why: dict[str, str]) -> Resolved:
    entry = find(c)
    if isinstance(c, ReadConfig):
        c.reads.clear()
    spec, names = entry.build(c)
    check_spec(spec)
    if offset := c.get("norm_offset"):
        names = Shifted(names, float(offset))
    values = dict(c.items())  # of which none is read here
    for ours, others in ALIASES.items():
        other = next((o for o in others if o in why and values.get(o) is not None), None)
        if ours in values and other is not None:
            why.setdefault(ours, f"{why[other]}, as {other}")
    for key in entry.defaults:
        why.setdefault(key, f"default ({entry.name})")
    for key in values:
        why.setdefault(key, "from the other keys")
    return Resolved(spec, names, c, why, spec.family)


def _resolve_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, read: Callable[[str], Tensor], overrides: Sequence[str]
) -> Resolved:
    given = dict(map(parse_override, overrides))
    reads = set[str]()
    kind = partial(ReadConfig, reads=reads) if given else Config
    flat, why = gguf_config(metadata, shapes, read, given, kind)
    read_first = set(reads)
    own = {key: value for key, value in flat.items() if why.get(key) != SET}
    flat |= given
    why |= dict.fromkeys(given, SET)
    _check_instead(given, flat, find(flat))
    c = _normalize_config(flat, kind)
    resolved = _build_resolved(c, why)
    check_routers(metadata, resolved.spec)
    check_windows(metadata, resolved.spec)
    check_scaling(metadata, flat.get("rope_scaling"), resolved.spec)
    names = gguf_names(c)
    reads |= read_first
    found = replace(resolved, names=names, hf_names=resolved.names)
    return _check_read(found, given, own)
