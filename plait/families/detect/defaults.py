"""Usual values that no shape shows, by family. Provenance says "default"."""

from __future__ import annotations

from plait.families.common.detection import has_rope
from plait.families.common.registry import families_by_name
from plait.families.common.tensors import Tensors

TOP_K = {8: 2, 16: 2, 32: 4, 60: 4, 64: 6, 128: 8, 160: 6, 256: 8, 512: 10}
ENDLESS = ("Mamba2", "Mamba", "FalconMamba", "Gemma3")  # no limit, or the family's own


def fill_defaults(t: Tensors, architecture: str, experts: int | None) -> None:
    """Every key that is still open and that the family does not settle by itself."""
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
