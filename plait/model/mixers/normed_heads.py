"""Attention of which each head's outputs are normed before a gate closes them (Muse Spark)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Norm
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.spec.attention import NormedHeadsSpec


def _words(m: NormedHeadsSpec) -> str:
    return f"{describe_attention(m)}, each head's outputs normed"


@mixer(NormedHeadsSpec, _words, divide_attention)
class NormedHeads(Attention):
    """All heads have one weight, if any: a rank norms its own."""

    def __init__(self, s: NormedHeadsSpec, w: Weights) -> None:
        super().__init__(s, w)
        self._each = Norm(s.each_norm, w.scope("each_norm"), s.head_dim)

    def _close(self, out: Tensor, x: Tensor, closing: list[Tensor]) -> Tensor:
        return super()._close(self._each(out), x, closing)
