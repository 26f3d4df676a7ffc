"""The tensors of heads of DFlash, DSpark and DFlash2, in files of their own: names, and what these show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plait.checkpoint.names import Derived, Rules, Source
from plait.families.common.recipes import check_rows, transformer
from plait.families.config.normalize import Config
from plait.families.detect.detect import Shapes
from plait.families.gguf.names import usual_names
from plait.quant.weight import as_tensor, pick_rows
from plait.spec.draft_heads import DFlashSpec

PREFIXES, TABLE = ("", "model."), "token_embd.weight"
SINKS = "self_attn.attention_sink_bias"
UNUSED = (r"(^|\.)confidence_head\.", r"^conf_proj\.")  # how sure it is of a draft: costs are measured


def find_prefix(shapes: Shapes) -> str | None:
    """The prefix of names of a head; None: it is none."""
    parts = ("hidden_norm", "fc", "layers.0.self_attn.k_proj")
    return next((p for p in PREFIXES if all(f"{p}{part}.weight" in shapes for part in parts)), None)


@dataclass(frozen=True, slots=True)
class Found:
    """What the tensors of a file say. `prefix`: of names. `has_*`: norms of queries, sinks, convolutions of
    DFlash2. `is_tied`: an embedding and no output head. `markov_rank`: numbers of a token in DSpark's tables.
    """

    prefix: str
    has_norms: bool
    has_sinks: bool
    is_tied: bool
    markov_rank: int | None
    has_convs: bool
    is_gguf: bool

    @classmethod
    def of(cls, shapes: Shapes, prefix: str = "", *, is_gguf: bool = False) -> Found:
        """Of a checkpoint, or of a GGUF file."""
        first = "blk.0." if is_gguf else f"{prefix}layers.0."
        norms, sinks = ("attn_q_norm", "attn_sinks.weight") if is_gguf else ("self_attn.q_norm", SINKS)
        table = TABLE if is_gguf else f"{prefix}embed_tokens.weight"
        markov = "markov_w1.weight" if is_gguf else f"{prefix}markov_head.markov_w1.weight"
        convs = "attn_conv_base" if is_gguf else "attention_conv.base_kernel"
        return cls(
            prefix,
            has_norms=f"{first}{norms}.weight" in shapes,
            has_sinks=f"{first}{sinks}" in shapes,
            is_tied=table in shapes and ("output.weight" if is_gguf else "lm_head.weight") not in shapes,
            markov_rank=shapes[markov][-1] if markov in shapes else None,
            has_convs=f"{first}{convs}" in shapes,
            is_gguf=is_gguf,
        )


def name_tensors(spec: DFlashSpec, found: Found, shapes: Shapes) -> Rules:
    """Ours to those of a checkpoint."""
    at = found.prefix
    names: dict[str, Source] = {
        **transformer(at),
        "embed": f"{at}embed_tokens",
        "d2t": "d2t",
        "layers.{i}.attn.sinks": f"{at}layers.{{i}}.{SINKS}",
        **{part: f"{at}{part}" for part in ("fc", "hidden_norm")},
        "markov.prev": f"{at}markov_head.markov_w1",
        "markov.next": f"{at}markov_head.markov_w2",
        "selector.hidden": f"{at}candidate_selector.hidden_projection",
    }
    for ours, theirs in {"prev": "predecessor_codebook", "next": "successor_codebook"}.items():
        stored = f"{at}candidate_selector.{theirs}"
        names[f"selector.{ours}.weight"] = stored if stored in shapes else f"{stored}.weight"
    if found.has_convs:
        for ours, theirs in {"attn": "attention_conv", "ffn": "mlp_conv"}.items():
            conv = f"{at}layers.{{i}}.{theirs}"
            names |= _convs(spec, ours, f"{conv}.base_kernel", f"{conv}.kernel_projection.weight")
    return names


def name_gguf_tensors(spec: DFlashSpec, found: Found, c: Config) -> Rules:
    """Ours to those of a GGUF file."""
    names: dict[str, Source | tuple[Source, ...]] = {
        "hidden_norm": "enc.output_norm",
        "fc": "fc",
        "tokens": "d2t",
        **usual_names(c),
        "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
        "markov.prev": "markov_w1",
        "markov.next": "markov_w2",
        "selector.hidden": "selector_hidden",
        "selector.prev": "selector_predecessor",
        "selector.next": "selector_successor",
    }
    if found.has_convs:
        for ours in ("attn", "ffn"):
            conv = f"blk.{{i}}.{ours}_conv"
            names |= _convs(spec, ours, f"{conv}_base", f"{conv}_proj.weight")
    return names


def _convs(spec: DFlashSpec, ours: str, base: str, taps: str) -> Mapping[str, Source]:
    """Taps of convolutions, which we have by channels, and the oldest first: theirs are the newest first."""
    assert spec.conv is not None
    kernel, groups = spec.conv.kernel, spec.hidden_size // spec.conv.group
    places = torch.arange(2 * kernel * groups).view(2, kernel, groups)
    order = places.flip(1).transpose(1, 2).flatten()
    made = Derived(lambda w, **_: pick_rows(check_rows(w, len(order)), order), (taps,))
    fixed = Derived(lambda w, **_: as_tensor(w).flip(1).contiguous(), (base,))
    return {
        f"layers.{{i}}.{ours}.conv.fixed": fixed,
        f"layers.{{i}}.{ours}.conv.taps.weight": made,
    }
