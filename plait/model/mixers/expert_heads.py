"""Attention with experts (JetMoe; Shen et al. 2024): a token chooses those of its queries and outputs."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CannotDivide, UnsupportedModel
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention
from plait.model.mixers.registry import mixer
from plait.ops.expert_heads import collect_heads, spread_heads
from plait.ops.linear import Linear
from plait.ops.moe import route
from plait.ops.rows import join
from plait.partition import Division, Rank
from plait.rare_specs import ExpertHeadsSpec
from plait.state.store import StateStore


def _words(m: ExpertHeadsSpec) -> str:
    return f"{describe_attention(m)}, of {m.top_k} of {m.num_experts} experts"


def _divide(s: ExpertHeadsSpec, rank: Rank, hidden_size: int) -> Division:
    raise CannotDivide("experts of attention are not divided among ranks")


@mixer(ExpertHeadsSpec, _words, _divide)
class ExpertHeads(Attention):
    """`experts.{e}.q` and `experts.{e}.o` are an expert's; keys and values are of all."""

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
        self._spread, self._collect, self._join = w.bind(spread_heads), w.bind(collect_heads), w.bind(join)

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        rows, hidden = self._experts.num_kv_heads * self._experts.head_dim, w.target.hidden_size
        each = [w.scope(f"experts.{e}") for e in range(self._experts.num_experts)]
        self.queries = [one.linear("q", in_size=hidden, out_sizes=(rows,)) for one in each]
        self.outputs = [one.linear("o", in_size=rows, out_sizes=(hidden,)) for one in each]
        return super()._bind_qkv(w, {name: parts[name] for name in "kv"})

    def _bind_o(self, w: Weights, width: int) -> Linear | None:
        return None

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self._experts
        weight, index = self._route(self.router(x), None, s.top_k, s.router)
        q = self._spread(x, index, self.queries, s.num_kv_heads)
        heads, _ = self.attend_heads(self._join(q.flatten(1), self.qkv(x)), batch, store)
        out: Tensor = self._collect(heads, weight, index, self.outputs, s.num_kv_heads)
        return out
