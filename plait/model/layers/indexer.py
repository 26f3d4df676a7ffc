"""The indexer of sparse attention (DeepSeek-V3.2): which keys the queries of a layer attend to."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.model.layers.temperature import HeadGrowth
from plait.ops.entry import CODED
from plait.ops.indexer import choose_keys
from plait.spec.model import IndexerSpec
from plait.spec.sparse import GrownIndexerSpec
from plait.state.store import StateStore


class Indexer:
    """Scores of all keys by small heads, and the best of them. It keeps a key of its own for each token.

    Of several ranks each has all of it, because what it chooses serves all heads.
    """

    def __init__(self, s: IndexerSpec, w: Weights, q_size: int) -> None:
        """q_size: of what index queries are made of: the queries' latent, or the hidden state."""
        self.spec, self._user, self.name = s, w.prefix.rpartition(".")[0], w.prefix
        self.top_k = min(s.top_k, w.target.max_len)
        self.states: dict[str, State] = {}
        if s.source:
            return
        hidden = w.target.hidden_size
        self._q = w.linear("q", in_size=q_size, out_sizes=(s.num_heads * s.dim,))
        self._k = w.linear("k", in_size=hidden, out_sizes=(s.dim,))
        self._weights = w.linear("weights", in_size=hidden, out_sizes=(s.num_heads,))
        self._norm = Norm(s.norm, w.scope("k_norm"), s.dim)
        self._input = self._growth = None
        if isinstance(s, GrownIndexerSpec):
            self._input = Norm(s.input_norm, w.scope("q_norm"), q_size)
            self._growth = HeadGrowth(w.scope("growth"), s.num_heads)
        self._rope = Rope(s.rope, w) if s.rope else None
        self._choose = w.bind(choose_keys, heads=s.num_heads, index_dim=s.dim, top_k=self.top_k)
        kept = w.target.kv_dtype
        self.states[self.name] = PagedState({"key": (s.dim,)}, dtype="bfloat16" if kept in CODED else kept)

    def __call__(self, x: Tensor, q: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], q: [T, q_size] -> positions [T, top_k] int32 (`ops.indexer.choose_keys`)."""
        s = self.spec
        if s.source:
            return batch.step["chosen", s.source]  # type: ignore[no-any-return]
        q = self._input(q) if self._input else q
        queries, keys = self._q(q).unflatten(-1, (s.num_heads, s.dim)), self._norm(self._k(x))[:, None]
        queries = self._growth(queries, batch) if self._growth else queries
        if self._rope:
            queries, keys = (self._rope(part, batch.positions) for part in (queries, keys))
        keys = keys[:, 0]
        index = batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        chosen = self._choose(queries, self._weights(x), keys, store[self.name]["key"], *where, self.top_k)
        batch.step["chosen", self._user] = chosen
        return chosen  # type: ignore[no-any-return]
