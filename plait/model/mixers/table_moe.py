"""Experts that a table has for each token (DeepSeek-V4's first layers): a router says their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CheckpointError
from plait.model.layers.layers import Batch
from plait.model.mixers.moe import Moe, divide_moe
from plait.model.mixers.registry import mixer
from plait.ops.moe import look_up_experts
from plait.ops.ranks import add_in_tree
from plait.spec.moe import TableMoeSpec
from plait.state.store import StateStore


def _words(m: TableMoeSpec) -> str:
    return (
        f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size} by a table of tokens, {m.router.score}"
    )


@mixer(TableMoeSpec, _words, divide_moe)
class TableMoe(Moe):
    """`table`: [vocabulary, top_k], the numbers of experts."""

    def __init__(self, s: TableMoeSpec, w: Weights) -> None:
        super().__init__(s, w)
        stored = w.tensor("table", (s.vocab_size, s.top_k), torch.int64)
        self.table = stored
        if stored.device.type != "meta" and not (
            int(stored.min()) >= 0 and int(stored.max()) < s.num_experts
        ):
            raise CheckpointError(
                f"{w.prefix}.table has experts {int(stored.min())} to {int(stored.max())}; there are "
                f"{s.num_experts}, counted from 0"
            )
        self._look_up = w.bind(look_up_experts, num_experts=s.num_experts, top_k=s.top_k, router=s.router)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        weight, index = self._look_up(self.router(x), self.table, batch.token_ids, self.spec.router)
        parts = [share(x, x, weight, index, None) for share in self.shares]
        return add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0))
