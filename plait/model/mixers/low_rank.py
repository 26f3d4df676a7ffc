"""Attention of which queries come from a few normed numbers of a token, over few keys (MFA; Step 3)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.linear import Linear
from plait.ops.rows import join
from plait.spec.attention import LowRankSpec
from plait.state.store import StateStore


def _words(m: LowRankSpec) -> str:
    return f"{describe_attention(m)}, queries of rank {m.q_rank}"


@mixer(LowRankSpec, _words, divide_attention)
class LowRankQueries(Attention):
    """`q_a` gives `q_rank` numbers, the same on every rank; `q` makes queries of them, normed."""

    def __init__(self, s: LowRankSpec, w: Weights) -> None:
        if s.gate:
            raise UnsupportedModel(f"{w.prefix}: queries of a low rank have no gate next to them")
        self._rank = s.q_rank
        super().__init__(s, w)
        self.q_a_norm = Norm(s.q_a_norm, w.scope("q_a_norm"), s.q_rank)
        self.q = w.linear("q", in_size=s.q_rank, out_sizes=(s.num_heads * s.head_dim,))
        self._join = w.bind(join)

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        return super()._bind_qkv(w, {"q_a": self._rank, "k": parts["k"], "v": parts["v"]})

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        first, kv = self.qkv(x).tensor_split([self._rank], -1)
        return self.attend(self._join(self.q(self.q_a_norm(first)), kv), x, batch, store)
