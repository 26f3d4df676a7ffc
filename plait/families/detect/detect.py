"""What a model is, from the names and shapes of its tensors alone: for checkpoints without a (whole) config.

Layer kinds and nearly all sizes are exact. What shapes cannot show (rope theta, top-k, windows, multipliers,
Mamba2's groups, plain GQA's head size) gets a default, and the provenance says so and why.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.families.common.detection import has_rope
from plait.families.common.registry import families_by_name
from plait.families.common.tensors import EMBEDDINGS, HEADS, Shapes, Tensors
from plait.families.detect.markers import find_architecture, layer_kinds
from plait.families.detect.sizes import (
    LATENT,
    attention_sizes,
    expert_sizes,
    feed_forward_sizes,
    latent_sizes,
)
from plait.families.detect.states import state_sizes

TOP_K = {8: 2, 16: 2, 32: 4, 60: 4, 64: 6, 128: 8, 160: 6, 256: 8, 512: 10}
ENDLESS = ("Mamba2", "Mamba", "FalconMamba", "Gemma3")  # no limit, or the family's own
__all__ = ["HEADS", "Shapes", "infer_config", "layer_kinds"]


def infer_config(
    shapes: Shapes, known: Mapping[str, object] | None = None
) -> tuple[dict[str, object], dict[str, str]]:
    """(config, provenance) of what `known` (a partial config) does not say. Raises UnsupportedModel.

    An architecture in `known` is a family's first.
    Provenance, per key: "tensor NAME shape" or "default (why)".
    """
    t = Tensors(shapes, known or {})
    embed = next(((n, s) for n, s in t.ends.items() if n.endswith(EMBEDDINGS) and len(s) == 2), None)
    if embed is not None:
        t.size("vocab_size", embed[1][0], embed)
        t.size("hidden_size", embed[1][1], embed)
    named = t.known.get("architectures")
    if named:
        architecture = str(named[0])
    else:
        architecture, why = find_architecture(t)
        t.put("architectures", [architecture], why)
    t.put("num_hidden_layers", len(t.layers), f"layers.0 … layers.{len(t.layers) - 1} of the file")
    if not any(head in t.ends for head in HEADS):
        t.put("tie_word_embeddings", True, f"tensor {HEADS[0]} is not there")
    else:
        t.put("tie_word_embeddings", False, f"tensor {next(h for h in HEADS if h in t.ends)}")
    _infer_sizes(t, architecture)
    return t.values, t.why


def _infer_sizes(t: Tensors, architecture: str) -> None:
    if t.has(LATENT):
        latent_sizes(t)
        state_sizes(t, architecture)
    else:
        state_sizes(t, architecture)
        if architecture == "OlmoHybridForCausalLM" and (heads := t.first("linear_attn.A_log")):
            t.default("num_attention_heads", heads[1][0], "as many as in the linear layers, as usual")
        attention_sizes(t, architecture)
    feed_forward_sizes(t)
    _fill_defaults(t, architecture, expert_sizes(t))


def _fill_defaults(t: Tensors, architecture: str, experts: int | None) -> None:
    """Usual values that no shape shows, of every key that is still open. Provenance says "default"."""
    entry = families_by_name().get(architecture)
    if experts is not None:
        top_k = entry.detection.top_k if entry is not None else None
        top_k = min(top_k or TOP_K.get(experts, 2), experts)
        t.default("num_experts_per_tok", top_k, f"usual for {experts} experts; --set num_experts_per_tok=…")
    if entry is not None:
        entry.detection.fill(t)
    own = entry.detection.usual if entry is not None else {}
    for key, value in own.items():
        if not (has_rope(t) and key.startswith("rope_")):
            t.default(key, value, f"usual for {architecture.partition('For')[0]}")
    if not architecture.startswith(ENDLESS):
        t.default("max_position_embeddings", 4096)
