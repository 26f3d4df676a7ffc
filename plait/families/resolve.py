"""The one entry: config, names and shapes of a checkpoint become a model as data, every number traced."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from plait.checkpoint.names import Source, UnknownName, make_derived, sources_of
from plait.errors import ConfigError, PlaitError, UnsupportedFormat, UnsupportedModel
from plait.families.common.inside import Inside, find_body
from plait.families.common.recipes import Shifted
from plait.families.common.registry import Family, UnknownArchitecture, families_by_name, find, names_in
from plait.families.common.resolved import Resolved
from plait.families.config.aliases import ALIASES
from plait.families.config.blocks import list_block_keys
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.neutral import NEUTRAL
from plait.families.config.normalize import (
    FULL,
    LINEAR,
    NOTHING,
    SHARE,
    SLIDING,
    Config,
    IncompleteConfig,
    flatten,
    normalize,
    reads_share,
)
from plait.families.config.wrappers import list_texts
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
# Keys that a config may hold besides the aliases and the family's defaults. So --set may name them.
KEYS = {
    *("architectures", "model_type", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"),
    *("original_max_position_embeddings", "sliding_window", "sliding_window_pattern", "use_sliding_window"),
    *("max_window_layers", "intermediate_size", "tie_word_embeddings", "attn_layer_indices", "mamba_expand"),
    *("hybrid_override_pattern", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "mlp_layer_types", "mamba_d_ssm", "num_heads"),
    *("num_nextn_predict_layers", "attention_bias", "ssm_cfg", "rope_interleave", "mamba_hidden_act"),
    *("norm_offset", "linear_key_head_dim", "topk_group", "use_mem_rope", "position_embedding_type"),
    *("attn_type_list", "block_ff_dim", "full_attention_idx", "lru_width", "mamba_enabled", "no_rope"),
    *("is_causal", "classifier_from_token", "id2label", "problem_type"),
    *("postnorm", "rotary_dim", "rotary_pct", "tokenizer_vocab", "eos_token_id"),
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
    """A config as far as it goes; names and shapes for the rest."""
    own = flatten(config or NOTHING)
    _check_storage(shapes)
    flat, why = dict(own), dict.fromkeys(own, FILE)
    given = _under_each_name(dict(map(parse_override, overrides)), flat)
    flat |= given
    why |= dict.fromkeys(given, SET)
    _check_keys(given, flat, own)
    _tie(flat, why, shapes)
    try:
        return _build_with_head(flat, why, shapes, read)
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
    known = {k: v for k, v in flat.items() if v is not None or k in given}
    why = {**reasons, **{k: why[k] for k in known}}
    return replace(_build_with_head({**inferred, **known}, why, shapes, read), is_detected=True)


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


def _check_keys(given: Mapping[str, Any], flat: Mapping[str, object], own: Iterable[str]) -> None:
    """Refuse keys that nothing reads, as they would be ignored in silence. `own`: those of the config."""
    aliases = {name for others in ALIASES.values() for name in others}
    known = {*KEYS, *ALIASES, *aliases, *NEUTRAL, *own}
    families = [find(flat)] if _is_known(flat) else families_by_name().values()
    for entry in families:
        known |= set(entry.defaults)
    for key in given:
        if key not in known and not (_is_known(flat) and _is_needed(key, flat)):
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"--set {key}=…: no model's config has such a key{hint}")
    if len(families) == 1:
        _check_read(given, flat, *families)
    is_whole = "gguf_architecture" not in flat and not any(
        reads_share(f.defaults, f.honours) for f in families
    )
    if is_whole and given.get(SHARE) not in (None, 1):
        raise ConfigError(f"--set {SHARE}={given[SHARE]}: models of this family do not read it; leave it out")


def _is_needed(key: str, flat: Mapping[str, object]) -> bool:
    """Whether the family of a config cannot be built without a key of it."""
    try:
        with blame_config():
            c = _normalize_config({k: v for k, v in flat.items() if k != key})
            find(c).build(c)
    except IncompleteConfig as error:
        return error.key == key
    except PlaitError:
        return False
    return False


def _check_read(given: Mapping[str, object], flat: Mapping[str, object], entry: Family) -> None:
    """Refuse keys of which a family reads another one in this config. Raises ConfigError."""
    blocks = list_block_keys(flat)
    for key in given.keys() - {"block_configs"}:
        other = "block_configs" if key in blocks else entry.hf.instead.get(key)
        if other and other not in given and flat.get(other, entry.defaults.get(other)) is not None:
            raise ConfigError(f"--set {key}=…: of this model {other} is read instead; set that")


def _is_known(flat: Mapping[str, Any]) -> bool:
    try:
        find(flat)
    except UnknownArchitecture:
        return False
    return True


def _normalize_config(flat: Mapping[str, Any]) -> Config:
    entry = find(flat)
    check_named(flat)
    return normalize(flat, entry.defaults, entry.honours, entry.hf.words)


def _tie(flat: dict[str, Any], why: dict[str, str], shapes: Shapes) -> None:
    """Without a head of its own a model is tied, whatever its config says."""
    if why.get("tie_word_embeddings") == SET or any(head in shapes for head in HEADS):
        return
    if not flat.get("tie_word_embeddings"):
        flat["tie_word_embeddings"], why["tie_word_embeddings"] = True, f"tensor {HEADS[0]} is not there"


def _build_with_head(
    flat: Mapping[str, object], why: dict[str, str], shapes: Shapes, read: Callable[[str], Tensor]
) -> Resolved:
    """What a config and the tensors say; a head with numbers of its own wins over a config that ties it.

    So does `transformers`. A copy of the embedding changes nothing: the model stays tied.
    """
    built, told = _build_once(flat, shapes, why)
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
    return _build_once({**flat, "tie_word_embeddings": False}, shapes, told)[0]


def _build_once(
    flat: Mapping[str, object], shapes: Shapes, why: Mapping[str, str]
) -> tuple[Resolved, dict[str, str]]:
    c, told = _normalize_config(flat), dict(why)
    _let_tensors_win(c, told, shapes)
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


def _let_tensors_win(c: Config, why: dict[str, str], shapes: Shapes) -> None:
    """Layer kinds from the tensors, which show what attends; a config that says otherwise is wrong."""
    if why.get("layer_types") == SET or "hybrid" in c["layer_types"]:
        return
    attends = next((word for word in c["layer_types"] if word in (FULL, SLIDING)), FULL)
    for i, (kind, name) in sorted(layer_kinds(shapes).items()):
        if i >= len(c["layer_types"]) or _sort(said := c["layer_types"][i]) == _sort(kind):
            continue
        c["layer_types"][i] = kind if kind in STATES else attends
        if "; config.json says" not in why.get("layer_types", ""):
            why["layer_types"] = f"tensor {name}; config.json says layer {i} is {said}"


def _sort(kind: str) -> str:
    """A word of `layer_types`; all attention counts as one, with or without a window."""
    return kind if kind in STATES else FULL


def _build_resolved(c: Config, why: dict[str, str]) -> Resolved:
    entry = find(c)
    spec, names = entry.build(c)
    check_spec(spec)
    if offset := c.get("norm_offset"):
        names = Shifted(names, float(offset))
    for ours, others in ALIASES.items():
        other = next((o for o in others if o in why and c.get(o) is not None), None)
        if ours in c and other is not None:
            why.setdefault(ours, f"{why[other]}, as {other}")
    for key in entry.defaults:
        why.setdefault(key, f"default ({entry.name})")
    for key in c:
        why.setdefault(key, "from the other keys")
    return Resolved(spec, names, c, why, spec.family)


def _resolve_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, read: Callable[[str], Tensor], overrides: Sequence[str]
) -> Resolved:
    given = dict(map(parse_override, overrides))
    flat, why = gguf_config(metadata, shapes, read, given)
    own = [key for key in flat if why.get(key) != SET]
    flat |= given
    why |= dict.fromkeys(given, SET)
    _check_keys(given, flat, own)
    c = _normalize_config(flat)
    resolved = _build_resolved(c, why)
    check_routers(metadata, resolved.spec)
    check_windows(metadata, resolved.spec)
    check_scaling(metadata, flat.get("rope_scaling"), resolved.spec)
    names = gguf_names(c)
    return Resolved(resolved.spec, names, c, resolved.provenance, resolved.family, hf_names=resolved.names)
