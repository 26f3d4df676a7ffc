"""DFlash, DSpark, DFlash2: heads that draft a block of tokens at once, in files of their own.

Layouts of z-lab's and DeepSeek's heads, of vLLM's Speculators (a config in two parts), and llama.cpp's files,
which have an architecture of their own. Tensors show what a checkpoint is: many configs say "Qwen3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from torch import Tensor

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.recipes import unused_patterns
from plait.families.common.resolved import Resolved
from plait.families.common.spec_builders import norm
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.normalize import FULL, SLIDING, Config, normalize
from plait.families.config.values import is_set, read_count
from plait.families.detect.detect import Shapes
from plait.families.dflash_names import TABLE, UNUSED, Found, find_prefix, name_gguf_tensors, name_tensors
from plait.families.eagle import (
    ARCHITECTURE,
    OF_TRAINING,
    blame_keys,
    check_body,
    count_tokens,
    flatten_head,
)
from plait.families.gguf.config import gguf_config
from plait.families.gguf.names import ROPE_TABLES
from plait.families.llama import QWEN, dense
from plait.families.resolve import FILE
from plait.spec.attention import BlockAttentionSpec
from plait.spec.draft_heads import BlockConvSpec, DFlashSpec, SelectorSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

OWN, GGUF = "dflash_config", "dflash"
# Of the head, in `dflash_config` or at the top. Elsewhere some of them are of a whole model.
KEYS = (
    *("mask_token_id", "target_layer_ids", "block_size", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "causal", "use_swa", "swa_window_size", "attention_value_scale"),
    *("projector_type", "aux_hidden_state_layer_ids", "sliding_window_non_causal", "is_causal"),
    *("is_neox_style", "rope_is_neox_style", "sample_from_anchor", "shift_label", "markov_rank"),
    *("markov_head_type", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
)
GGUF_KEYS = {
    "target_layers": "aux_hidden_state_layer_ids",
    "attention.causal": "causal",
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "attention.value_scale": "attention_value_scale",
    **{key: key for key in ("block_size", "final_logit_softcapping", "sample_from_anchor")},
    **{key: key for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")},
}
DEFAULTS = {"norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}
LARGEST, LONGEST, WIDEST = 1024, 16, 4096  # rows of a block; taps, numbers and tokens of what chooses


def resolve_dflash(config: Mapping[str, object] | None, shapes: Shapes) -> Resolved:
    """What a head is. Its spec is a `DFlashSpec`. Raises UnsupportedModel.

    config: its config.json; shapes: every tensor, rows first.
    """
    with blame_config():
        found = Found.of(shapes, find_prefix(shapes) or "")
        flat = flatten_head(config or {})
        own = _take_own(flat)
        if (length := (config or {}).get("sliding_window")) is not None:  # of `use_swa`
            own.setdefault("swa_window_size", length)
        check_named(flat)
        check_body(flat)
        c = normalize(flat, {**QWEN, **DEFAULTS}, ("sliding_window",))
        spec = _build(c, own, found)
        check_spec(spec)
    why = {key: FILE if key in flat else "from the other keys" for key in c}
    names = name_tensors(spec, found, shapes)
    ignored = unused_patterns(c, *UNUSED, *OF_TRAINING)
    return Resolved(spec, NameMap(names, ignored=ignored), c, why, spec.family)


def is_dflash_gguf(metadata: Mapping[str, object]) -> bool:
    """Whether a GGUF file holds a head, by its metadata."""
    return metadata.get(ARCHITECTURE) == GGUF


def resolve_dflash_gguf(
    metadata: Mapping[str, object], shapes: Shapes, read: Callable[[str], Tensor]
) -> Resolved:
    """The same of a GGUF file: its layers are what the format calls "qwen3". Raises UnsupportedModel.

    read: a tensor's numbers, which only divisors of rotations need.
    """
    part = {key.removeprefix(f"{GGUF}."): metadata[key] for key in metadata if key.startswith(f"{GGUF}.")}
    own = {ours: part.pop(theirs) for theirs, ours in GGUF_KEYS.items() if theirs in part}
    part.pop("has_confidence_head", None)
    if (mask := metadata.get("tokenizer.ggml.mask_token_id")) is not None:
        own["mask_token_id"] = mask
    windows = part.pop("attention.sliding_window_pattern", None)
    own["sliding_window_non_causal"] = isinstance(windows, list | tuple) and all(windows)  # `use_swa`
    body = {f"qwen3.{key}": value for key, value in part.items()} | {ARCHITECTURE: "qwen3"}
    with blame_config("the metadata"), blame_keys("qwen3", GGUF):
        size = count_tokens(metadata, GGUF)
        flat, why = gguf_config(body, {**shapes, TABLE: (size, 0)}, read)
        flat |= _windows(windows)
        c = normalize(flat, {**QWEN, **DEFAULTS}, ("sliding_window",))
        c["draft_vocab_size"] = shapes.get("output.weight", shapes.get("d2t", (size,)))[0]
        c["tie_word_embeddings"] = TABLE in shapes and "output.weight" not in shapes
        found = Found.of(shapes, is_gguf=True)
        spec = _build(c, own, found)
        check_spec(spec)
    names = NameMap(name_gguf_tensors(spec, found, c), ignored=(ROPE_TABLES, *UNUSED))
    return Resolved(spec, names, c, why, spec.family)


def _windows(pattern: object) -> dict[str, object]:
    """Which layers have windows, as a config says it. Raises UnsupportedModel for no list of flags."""
    if pattern is None:
        return {"layer_types": None, "sliding_window": None}
    if not isinstance(pattern, list | tuple) or not all(isinstance(one, bool) for one in pattern):
        raise UnsupportedModel(f"sliding_window_pattern is {str(pattern)[:40]!r}, not true or false by layer")
    return {"layer_types": [SLIDING if one else FULL for one in pattern], "use_sliding_window": True}


def _take_own(flat: Config) -> Config:
    """The head's keys, which are no longer in `flat`; what is null is as if it were not there."""
    own = {key: flat.pop(key) for key in KEYS if key in flat}
    inner = flat.pop(OWN, None)
    whole = {**own, **(inner if isinstance(inner, Mapping) else {})}
    return Config({key: value for key, value in whole.items() if value is not None})


def _build(c: Config, own: Config | dict[str, object], found: Found) -> DFlashSpec:
    _check_own(own)
    interleaved = not all(is_set(own, key, usual=True) for key in ("is_neox_style", "rope_is_neox_style"))
    qk_norm = norm(c) if found.has_norms else None
    body, _ = dense(c, "dflash", qk_norm=qk_norm, sinks=found.has_sinks, interleaved=interleaved)
    if not body.layers:
        raise UnsupportedModel("num_hidden_layers is 0, and a head has a layer at least")
    conv, selector = _sizes(own, body) if found.has_convs else (None, None)
    cap = own.get("final_logit_softcapping")
    return DFlashSpec(
        family="dflash",
        hidden_size=body.hidden_size,
        vocab_size=body.vocab_size,
        layers=_see(body, own),
        norm=body.norm,
        max_len=body.max_len,
        tied=bool(c.get("tie_word_embeddings")) and found.is_tied,
        embed_scale=_number(own, "input_embedding_scale", 1.0),
        logit_scale=_number(own, "output_multiplier", 1.0),
        logit_softcap=_number(own, "final_logit_softcapping", 0.0) if cap else None,
        num_drafted=c.get("draft_vocab_size") or c["vocab_size"],
        model_size=c.get("target_hidden_size") or c["hidden_size"],
        taps=_taps(own),
        block_size=read_count(own, "block_size", 16, 2, LARGEST),
        mask_token=read_count(own, "mask_token_id", None, 0, body.vocab_size - 1),
        from_last=_reads_last(own, found),
        markov_rank=found.markov_rank,
        conv=conv,
        selector=selector,
    )


def _reads_last(own: Mapping[str, object], found: Found) -> bool:
    """Whether the last token's row gives a token, too: usual for DSpark, but not in Speculators' layout."""
    is_parts = "aux_hidden_state_layer_ids" in own and not found.is_gguf
    return is_set(own, "sample_from_anchor", usual=bool(found.markov_rank) and not is_parts)


def _sizes(own: Mapping[str, object], body: ModelSpec) -> tuple[BlockConvSpec, SelectorSpec]:
    """Of what DFlash2 has more than DFlash."""
    group = read_count(own, "conv_group_size", None, 1, body.hidden_size)
    if body.hidden_size % group:
        raise UnsupportedModel(f"conv_group_size is {group}, which does not divide {body.hidden_size}")
    rank = read_count(own, "selector_rank", None, 1, WIDEST)
    top = read_count(own, "selector_top_k", None, 1, min(WIDEST, body.vocab_size))
    kernel = read_count(own, "conv_kernel_size", None, 2, LONGEST)
    return BlockConvSpec(kernel, group), SelectorSpec(rank, top)


def _see(body: ModelSpec, own: Mapping[str, object]) -> tuple[tuple[BranchSpec, ...], ...]:
    """The layers of a body as those of a head: what a row of a block sees of it.

    A layer with a window sees rows before it alone, and one without sees all, where the config says no more.
    """
    every = next((is_set(own, key) for key in ("is_causal", "causal") if own.get(key) is not None), None)
    windows = is_set(own, "use_swa") and not any(m.window for m in body.mixers_of(AttentionSpec))
    length = read_count(own, "swa_window_size", None, 1, 2**31) if windows else None

    def turn(branch: BranchSpec) -> BranchSpec:
        m = branch.mixer
        if not isinstance(m, AttentionSpec):
            return branch
        ahead = m.window is None or is_set(own, "sliding_window_non_causal")
        ahead = not every if every is not None else ahead
        values = {field.name: getattr(m, field.name) for field in fields(m)} | (
            {"window": length} if length else {}
        )
        return replace(branch, mixer=BlockAttentionSpec(**values, sees_ahead=ahead))

    return tuple(tuple(turn(branch) for branch in layer) for layer in body.layers)


def _check_own(own: Mapping[str, object]) -> None:
    """Raises UnsupportedModel for what would give other drafts."""
    if (kind := own.get("projector_type", GGUF)) != GGUF:
        raise UnsupportedModel(f"projector_type is {str(kind)[:40]!r}, which is not implemented; 'dflash' is")
    if is_set(own, "shift_label"):
        raise UnsupportedModel("shift_label is true, which is not implemented for heads of DFlash")
    if (kind := own.get("markov_head_type", "vanilla")) != "vanilla":
        raise UnsupportedModel(
            f"markov_head_type is {str(kind)[:40]!r}, which is not implemented; vanilla is"
        )
    if _number(own, "attention_value_scale", 1.0) != 1.0:
        raise UnsupportedModel("attention_value_scale is not 1, which is not implemented for heads of DFlash")


def _taps(own: Mapping[str, object]) -> tuple[int, ...]:
    """The layers before which states are read: those behind `target_layer_ids`, or Speculators' own words."""
    behind, before = own.get("target_layer_ids"), own.get("aux_hidden_state_layer_ids")
    found = before if before is not None else behind
    if not isinstance(found, list | tuple) or not found:
        raise UnsupportedModel(
            f"the file has no target_layer_ids ({GGUF}.target_layers in GGUF): the layers of which it reads"
        )
    for layer in found:
        if type(layer) is not int:
            raise UnsupportedModel(
                f"{str(layer)[:40]!r} is no number of a layer of which a head reads states"
            )
    return tuple(found) if before is not None else tuple(layer + 1 for layer in found)


def _number(own: Mapping[str, object], key: str, usual: float) -> float:
    value = own.get(key)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, not a number above 0 and below 1e6")
    return float(value)
