"""Attention that reads the keys and values of an earlier layer (Gemma 4): it projects queries alone."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import State, group_name
from plait.model.layers.head_norm import HeadNorm
from plait.model.layers.layers import Batch, Rope
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.attention import paged_attention
from plait.partition import Division, Rank
from plait.spec.attention import SharedKeysSpec
from plait.state.store import StateStore


def _words(m: SharedKeysSpec) -> str:
    return f"{describe_attention(m)}, keys and values of {m.source}"


def _divide(s: SharedKeysSpec, rank: Rank, hidden_size: int) -> Division:
    """As its source is: a rank has the keys that its queries read."""
    return divide_attention(s, rank, hidden_size)


@mixer(SharedKeysSpec, _words, _divide)
class SharedKeys:
    """It has no state: the step's new keys are in its source's before it runs."""

    def __init__(self, s: SharedKeysSpec, w: Weights) -> None:
        if (
            s.sinks
            or s.sink_keys
            or s.chunk
            or s.gate
            or s.qk_norm_last
            or s.temperature
            or s.v_norm
            or s.slopes
            or s.clip
            or s.out_norm
        ):
            raise UnsupportedModel(
                "shared keys with sinks, chunks, gates, slopes, clips or growing queries are not implemented"
            )
        self.spec, self.states, q = s, dict[str, State](), s.num_heads * s.head_dim
        self.q = w.linear("q", in_size=w.target.hidden_size, out_sizes=(q,))
        self.o = w.linear("o", in_size=q, out_sizes=(w.target.hidden_size,))
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.rope = Rope(s.rope, w) if s.rope else None
        sizes: dict[str, object] = dict(heads=s.num_heads, kv_heads=s.num_kv_heads, dim=s.head_dim)
        sizes |= dict(window=s.window, softcap=s.softcap, sinks=False, activations=w.target.activations)
        self._attend = w.bind(paged_attention, **sizes)
        self._group = group_name(s.window)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, cache, index = self.spec, store[self.spec.source], batch.paged[self._group]
        q = self.q(x).unflatten(-1, (-1, s.head_dim))
        q = self.q_norm(q) if self.q_norm else q
        q = self.rope(q, batch.positions) if self.rope else q
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        out = self._attend(q, None, None, cache["k"], cache["v"], *where, s.scale, s.window, s.softcap)
        return self.o(out.flatten(1))
