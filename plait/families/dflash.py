"""DFlash: heads that draft a block of tokens at once, in files of their own, one for each model.

Layouts of z-lab's heads, of vLLM's Speculators (a config in two parts), and llama.cpp's files, which have an
architecture of their own. A tensor shows that a checkpoint is one: many configs say "Qwen3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import fields, replace

from torch import Tensor

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.resolved import Resolved
from plait.families.common.spec_builders import norm
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.normalize import FULL, SLIDING, Config, normalize
from plait.families.detect.detect import Shapes
from plait.families.eagle import ARCHITECTURE, TABLE, UNUSED, check_body, flatten_head, is_set
from plait.families.gguf.config import gguf_config
from plait.families.gguf.names import ROPE_TABLES, usual_names
from plait.families.llama import QWEN, dense
from plait.families.resolve import FILE
from plait.spec.attention import BlockAttentionSpec
from plait.spec.draft_heads import DFlashSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

PREFIXES = ("", "model.")
OWN, GGUF, SINKS = "dflash_config", "dflash", "self_attn.attention_sink_bias"
# Of the head, in `dflash_config` or at the top. Elsewhere some of them are of a whole model.
KEYS = (
    *("mask_token_id", "target_layer_ids", "block_size", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "causal", "use_swa", "swa_window_size", "attention_value_scale"),
    *("projector_type", "aux_hidden_state_layer_ids", "sliding_window_non_causal", "is_causal"),
    *("is_neox_style", "sample_from_anchor", "shift_label"),
)
DEFAULTS = {"norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}
# Tensors of heads that go on from a block of DFlash, and what these are called.
RELATIVES = {
    "markov": "DSpark",
    "candidate_selector.": "DFlash2",
    "selector_hidden": "DFlash2",
    "prefix_gru": "Domino",
}
LARGEST = 1024  # tokens of a block


def find_prefix(shapes: Shapes) -> str | None:
    """The prefix of names of a DFlash head; None: it is none."""
    parts = ("hidden_norm", "fc", "layers.0.self_attn.k_proj")
    return next((p for p in PREFIXES if all(f"{p}{part}.weight" in shapes for part in parts)), None)


def resolve_dflash(config: Mapping[str, object] | None, shapes: Shapes) -> Resolved:
    """What a head is. Its spec is a `DFlashSpec`. Raises UnsupportedModel.

    config: its config.json; shapes: every tensor, rows first.
    """
    prefix = find_prefix(shapes) or ""
    _check_relatives(shapes)
    with blame_config():
        flat = flatten_head(config or {})
        own = _take_own(flat)
        check_named(flat)
        check_body(flat)
        c = normalize(flat, {**QWEN, **DEFAULTS}, ("sliding_window",))
        spec = _build(c, own, _Found(shapes, prefix))
        check_spec(spec)
    why = {key: FILE if key in flat else "from the other keys" for key in c}
    return Resolved(spec, NameMap(_names(prefix), ignored=unused_patterns(c, *UNUSED)), c, why, spec.family)


def is_dflash_gguf(metadata: Mapping[str, object]) -> bool:
    """Whether a GGUF file holds a head, by its metadata."""
    return metadata.get(ARCHITECTURE) == GGUF


def resolve_dflash_gguf(
    metadata: Mapping[str, object], shapes: Shapes, read: Callable[[str], Tensor]
) -> Resolved:
    """The same of a GGUF file: its layers are what the format calls "qwen3". Raises UnsupportedModel.

    read: a tensor's numbers, which only divisors of rotations need.
    """
    _check_relatives(shapes)
    part = {key.removeprefix(f"{GGUF}."): metadata[key] for key in metadata if key.startswith(f"{GGUF}.")}
    names = {
        "block_size": "block_size",
        "target_layers": "aux_hidden_state_layer_ids",
        "attention.causal": "causal",
        "embedding_scale": "input_embedding_scale",
        "logit_scale": "output_multiplier",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.value_scale": "attention_value_scale",
    }
    own = {ours: part.pop(theirs) for theirs, ours in names.items() if theirs in part}
    own["mask_token_id"] = metadata.get("tokenizer.ggml.mask_token_id")
    windows = part.pop("attention.sliding_window_pattern", None)
    own["sliding_window_non_causal"] = isinstance(windows, list | tuple) and all(windows)  # `use_swa`
    body = {f"qwen3.{key}": value for key, value in part.items()} | {ARCHITECTURE: "qwen3"}
    with blame_config("the metadata"):
        tokens = metadata.get("tokenizer.ggml.tokens")
        size = int(str(part.get("vocab_size") or (len(tokens) if isinstance(tokens, Sized) else 0)))
        flat, why = gguf_config(body, {**shapes, TABLE: (size, 0)}, read)
        flat |= _windows(windows)
        c = normalize(flat, {**QWEN, **DEFAULTS}, ("sliding_window",))
        c["draft_vocab_size"] = shapes.get("output.weight", shapes.get("d2t", (size,)))[0]
        c["tie_word_embeddings"] = TABLE in shapes and "output.weight" not in shapes
        spec = _build(c, own, _Found(shapes, "", is_gguf=True))
        check_spec(spec)
    rules: Rules = {
        "hidden_norm": "enc.output_norm",
        "fc": "fc",
        "tokens": "d2t",
        **usual_names(c),
        "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
    }
    return Resolved(spec, NameMap(rules, ignored=(ROPE_TABLES,)), c, why, spec.family)


def _windows(pattern: object) -> dict[str, object]:
    """Which layers have windows, as a config says it. Raises UnsupportedModel for no list of flags."""
    if pattern is None:
        return {"layer_types": None, "sliding_window": None}
    if not isinstance(pattern, list | tuple) or not all(isinstance(one, bool) for one in pattern):
        raise UnsupportedModel(f"sliding_window_pattern is {str(pattern)[:40]!r}, not true or false by layer")
    return {"layer_types": [SLIDING if one else FULL for one in pattern], "use_sliding_window": True}


class _Found:
    """What the tensors of a file say. `prefix`: of names."""

    def __init__(self, shapes: Shapes, prefix: str, *, is_gguf: bool = False) -> None:
        first = "blk.0." if is_gguf else f"{prefix}layers.0."
        norms, sinks = ("attn_q_norm", "attn_sinks.weight") if is_gguf else ("self_attn.q_norm", SINKS)
        self.has_norms, self.has_sinks = f"{first}{norms}.weight" in shapes, f"{first}{sinks}" in shapes
        table, head = (
            (TABLE, "output.weight") if is_gguf else (f"{prefix}embed_tokens.weight", "lm_head.weight")
        )
        self.is_tied = table in shapes and head not in shapes


def _check_relatives(shapes: Shapes) -> None:
    """Raises UnsupportedModel for a head of another kind that has all tensors of DFlash, and more."""
    for part, title in RELATIVES.items():
        if any(part in name for name in shapes):
            raise UnsupportedModel(
                f"it is a head of {title}, which is not implemented; heads of DFlash are read"
            )


def _take_own(flat: Config) -> Config:
    """The head's keys, which are no longer in `flat`."""
    own = {key: flat.pop(key) for key in KEYS if key in flat}
    inner = flat.pop(OWN, None)
    return Config({**own, **(inner if isinstance(inner, Mapping) else {})})


def _build(c: Config, own: Config | dict[str, object], found: _Found) -> DFlashSpec:
    _check_own(own)
    interleaved = not is_set(own, "is_neox_style", usual=True)
    qk_norm = norm(c) if found.has_norms else None
    body, _ = dense(c, "dflash", qk_norm=qk_norm, sinks=found.has_sinks, interleaved=interleaved)
    if not body.layers:
        raise UnsupportedModel("num_hidden_layers is 0, and a head has a layer at least")
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
        block_size=_count(own, "block_size", 16, 2, LARGEST),
        mask_token=_count(own, "mask_token_id", None, 0, body.vocab_size - 1),
    )


def _see(body: ModelSpec, own: Mapping[str, object]) -> tuple[tuple[BranchSpec, ...], ...]:
    """The layers of a body as those of a head: what a row of a block sees of it.

    A layer with a window sees rows before it alone, and one without sees all, where the config says no more.
    """
    every = next((is_set(own, key) for key in ("is_causal", "causal") if own.get(key) is not None), None)
    windows = is_set(own, "use_swa") and not any(m.window for m in body.mixers_of(AttentionSpec))
    length = _count(own, "swa_window_size", None, 1, 2**31) if windows else None

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
    for key in ("sample_from_anchor", "shift_label"):
        if is_set(own, key):
            raise UnsupportedModel(f"{key} is true, which is not implemented for heads of DFlash")
    if _number(own, "attention_value_scale", 1.0) != 1.0:
        raise UnsupportedModel("attention_value_scale is not 1, which is not implemented for heads of DFlash")


def _taps(own: Mapping[str, object]) -> tuple[int, ...]:
    """The layers before which states are read: those behind `target_layer_ids`, or Speculators' own words."""
    behind, before = own.get("target_layer_ids"), own.get("aux_hidden_state_layer_ids")
    found = before if before is not None else behind
    if not isinstance(found, list | tuple) or not found:
        raise UnsupportedModel("the config has no target_layer_ids, the layers of which a head reads states")
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


def _count(own: Mapping[str, object], key: str, usual: int | None, least: int, most: int) -> int:
    value = own.get(key, usual)
    if type(value) is not int or not least <= value <= most:
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, not a number from {least} to {most}")
    return value


def _names(prefix: str) -> Rules:
    """Ours to those of the file."""
    names: dict[str, Source] = {
        "embed": f"{prefix}embed_tokens",
        "d2t": "d2t",
        "layers.{i}.attn.sinks": f"{prefix}layers.{{i}}.{SINKS}",
        **{part: f"{prefix}{part}" for part in ("fc", "hidden_norm")},
    }
    return {**transformer(prefix), **names}
