"""The indexer of block-sparse attention (MiniMax-M3): which blocks of keys each key-value head attends to."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.ops.block_sparse import choose_blocks
from plait.ops.entry import CODED
from plait.sparse_specs import BlockIndexSpec
from plait.state.store import StateStore


class BlockIndexer:
    """A query for each key-value head, and a key for each token that serves all of them.

    Of several ranks each has the queries of its own heads, and all keys.
    """

    def __init__(self, s: BlockIndexSpec, heads: int, w: Weights) -> None:
        self.spec, self.name, self.size, self._heads = s, w.prefix, s.size, heads
        self.top_k = min(s.top_k, -(-w.target.max_len // s.size))
        hidden = w.target.hidden_size
        self._q = w.linear("q", in_size=hidden, out_sizes=(heads * s.dim,))
        self._k = w.linear("k", in_size=hidden, out_sizes=(s.dim,))
        self._q_norm, self._k_norm = (Norm(s.norm, w.scope(f"{x}_norm"), s.dim) for x in "qk")
        self._rope = Rope(s.rope, w)
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        sizes = {"kv_heads": heads, "index_dim": s.dim, "kv_dtype": kept}
        self._choose = w.bind(choose_blocks, **sizes, top_k=self.top_k)
        state = PagedState({"key": (s.dim,)}, dtype=kept)
        self.states: dict[str, State] = {self.name: state}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> blocks [T, heads, top_k] int32 (`ops.block_sparse.choose_blocks`)."""
        s = self.spec
        q = self._q_norm(self._q(x).unflatten(-1, (self._heads, s.dim)))
        k = self._k_norm(self._k(x))[:, None]
        q, k = self._rope(q, batch.positions), self._rope(k, batch.positions)[:, 0]
        index = batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        chosen: Tensor = self._choose(q, k, store[self.name]["key"], *where, s.size, self.top_k, s.local)
        return chosen
