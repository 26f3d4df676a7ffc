"""Block-sparse attention (MiniMax-M3, Qwen4-Exp): queries read blocks of keys that an indexer chose."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.compressor import MeanIndexer
from plait.model.layers.head_norm import HeadNorm
from plait.model.layers.layers import Batch, Norm, Rope
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import gate
from plait.ops.block_sparse import block_sparse_attention, choose_blocks
from plait.ops.entry import CODED, head_widths
from plait.ops.place import HeadNorms, place_heads
from plait.partition import Cut, Division, Rank, scale_range
from plait.spec.sparse import BlockIndexSpec, BlockSparseSpec, MeanSparseSpec
from plait.state.store import StateStore


def _words(m: BlockSparseSpec) -> str:
    i = m.indexer
    return f"{describe_attention(m)}, the best {i.top_k} blocks of {i.size} keys by an indexer of {i.dim}"


def _divide(s: BlockSparseSpec, rank: Rank, hidden_size: int) -> Division:
    """Index queries go with the key-value heads that they choose for; index keys are whole."""
    found = divide_attention(s, rank, hidden_size)
    kv = rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads")
    return replace(found, cuts={**found.cuts, "index.q": Cut((scale_range(kv, s.indexer.dim),))})


def _mean_words(m: MeanSparseSpec) -> str:
    i = m.indexer
    return (
        f"{describe_attention(m)}, the best {i.top_k} blocks of {i.compressor.rate} keys by means, of "
        f"{i.num_heads} index heads × {i.dim}"
    )


class BlockIndexer:
    """Which blocks of keys each key-value head attends to (MiniMax-M3).

    It has a query for each of these heads, and a key for each token that serves all of them.
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


@mixer(MeanSparseSpec, _mean_words, divide_attention)  # every rank has the whole indexer
@mixer(BlockSparseSpec, _words, _divide)
class BlockSparseAttention:
    def __init__(self, s: BlockSparseSpec | MeanSparseSpec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        parts = {"q": q, "k": kv, "v": kv, **({"gate": q} if s.gate else {})}
        self._parts = [size // s.head_dim for size in parts.values()]
        self.qkv = w.linear(*parts, in_size=hidden, out_sizes=tuple(parts.values()))
        self._gate = w.bind(gate) if s.gate else None
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.k_norm = HeadNorm(s.qk_norm, s, w.scope("k_norm"), s.num_kv_heads) if s.qk_norm else None
        self.rope = Rope(s.rope, w) if s.rope else None
        self.indexer = _build_indexer(s, w.scope("index"))
        # Its kernel reads no codes, and without it a reply's bits would depend on how its prompt was cut.
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        sizes = dict(heads=s.num_heads, kv_heads=s.num_kv_heads, dim=s.head_dim, kv_dtype=kept)
        sizes["top_k"] = self.indexer.top_k
        self._place, self._attend = w.bind_pair(place_heads, block_sparse_attention, **sizes)
        norms = self.q_norm and self.k_norm and (self.q_norm.weights, self.k_norm.weights)
        self._norms = HeadNorms(*norms, s.qk_norm_over) if norms else None
        self._turn = self.rope.rotation if self.rope else None
        if self.q_norm and self.q_norm.is_gathered:
            self._place = None  # what places heads reaches no other rank
        widths = zip("kv", head_widths(s.head_dim, kept), strict=True)
        entry = {name: (s.num_kv_heads, width) for name, width in widths}
        self.states: dict[str, State] = {self.name: PagedState(entry, dtype=kept), **self.indexer.states}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, cache, index = self.spec, store[self.name], batch.paged[group_name(None)]
        chosen = self.indexer(x, batch, store)
        q, k, v, *closing = self.qkv(x).unflatten(-1, (-1, s.head_dim)).split(self._parts, 1)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        caches, how = (cache["k"], cache["v"]), (s.scale, self.indexer.size)
        if self._place:
            to = (*caches, index.slot_mapping, batch.positions)
            q, k, v = self._place(q, k, v, *to, self._norms, self._turn), None, None
        elif self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope and k is not None:
            q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        out = self._attend(q, k, v, *caches, chosen, *where, *how).flatten(1)
        return self.o(self._gate(out, closing[0].flatten(1)) if self._gate else out)


def _build_indexer(s: BlockSparseSpec | MeanSparseSpec, w: Weights) -> BlockIndexer | MeanIndexer:
    if isinstance(s, MeanSparseSpec):
        return MeanIndexer(s.indexer, s.num_kv_heads, w)
    return BlockIndexer(s.indexer, s.num_kv_heads, w)
