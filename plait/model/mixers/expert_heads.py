"""Attention with experts (JetMoe; Shen et al. 2024): a token chooses those of its queries and outputs."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.model.layers.expert_layers import bind_experts
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine
from plait.ops.expert_heads import collect_heads, spread_heads
from plait.ops.linear import Linear
from plait.ops.moe import route
from plait.ops.ranks import add_in_tree
from plait.ops.rows import join
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.spec.attention import ExpertHeadsSpec
from plait.state.store import StateStore


def _words(m: ExpertHeadsSpec) -> str:
    return f"{describe_attention(m)}, of {m.top_k} of {m.num_experts} experts"


def _divide(s: ExpertHeadsSpec, rank: Rank, hidden_size: int) -> Division:
    """Key heads, with the queries and outputs that every expert has for them; the router is whole."""
    ranges = rank.divide(s.num_kv_heads, "key heads", s.head_dim)
    heads = join_ranges(rank.divide(s.num_kv_heads, "key heads"))
    rows = Cut((scale_range(heads, s.head_dim),))
    cuts = {"k": rows, "v": rows, "experts.*.q": rows, "experts.*.o": Cut(cols=sum_of(ranges))}
    return Division(replace(s, num_heads=s.top_k * width(heads), num_kv_heads=width(heads)), cuts)


@mixer(ExpertHeadsSpec, _words, _divide)
class ExpertHeads(Attention):
    """`experts.{e}.q` and `experts.{e}.o` are an expert's; keys and values are of all.

    Of several shares of a rank each collects its own heads, so that sums are in the order of shares.
    """

    def __init__(self, s: ExpertHeadsSpec, w: Weights) -> None:
        if s.num_heads != s.top_k * s.num_kv_heads or s.gate or s.head_gate or s.out_norm:
            raise UnsupportedModel(
                f"{w.prefix}: {s.top_k} experts over {s.num_kv_heads} key heads have their product of heads, "
                f"not {s.num_heads}, and no gates or norms behind them"
            )
        self._experts = s
        super().__init__(s, w)
        self.router = w.linear("router", in_size=w.target.hidden_size, out_sizes=(s.num_experts,))
        self._route = w.bind(route, num_experts=s.num_experts, top_k=s.top_k, router=s.router)
        self._join, self._combine = w.bind(join), w.bind(combine)

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        s, hidden = self._experts, w.target.hidden_size
        rows, count = s.num_kv_heads * s.head_dim, s.num_experts
        self._spread, self.queries = bind_experts(w, spread_heads, "q", (hidden, rows), count)
        rank = w.target.comm.rank
        own = rank.own_shares
        views = [w.for_share(number) for number in own] if rank.shares else [w]
        sizes = rows // len(own), hidden
        self._shares = [bind_experts(view, collect_heads, "o", sizes, count) for view in views]
        return super()._bind_qkv(w, {name: parts[name] for name in "kv"})

    def _bind_o(self, w: Weights, width: int) -> Linear | None:
        return None

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self._experts
        weight, index = self._route(self.router(x), None, s.top_k, s.router)
        q = self._spread(x, index, self.queries, s.num_kv_heads)
        heads, _ = self.attend_heads(self._join(q.flatten(1), self.qkv(x)), batch, store)
        groups = s.num_kv_heads // len(self._shares)
        parts = [
            collect(heads.narrow(1, n * groups * s.top_k, groups * s.top_k), weight, index, outputs, groups)
            for n, (collect, outputs) in enumerate(self._shares)
        ]
        return add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0))
