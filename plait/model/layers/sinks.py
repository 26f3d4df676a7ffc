"""What a softmax has next to its keys: scores with the value 0, of heads (gpt-oss) or queries (IQuest Q1)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.heads import bind_heads
from plait.spec.model import AttentionSpec


class Sinks:
    """`sinks` [heads]; or `sink_keys` [kv_heads, d], a key for each head of keys, which no rotation turns."""

    def __init__(self, s: AttentionSpec, w: Weights) -> None:
        self._of_heads = w.tensor("sinks", (s.num_heads,), torch.float32) if s.sinks else None
        if not s.sinks:
            keys = w.tensor("sink_keys", (s.num_kv_heads, s.head_dim), torch.float32) * s.scale
            rows = keys.repeat_interleave(s.num_heads // s.num_kv_heads, 0)[:, None].contiguous()
            self._map, self._rows = bind_heads(w.bind, rows)

    def __call__(self, q: Tensor) -> Tensor:
        """q: [T, heads, d], as keys are compared with it -> [heads], or [T, heads] of each token; float32."""
        if self._of_heads is not None:
            return self._of_heads
        return self._map(q.float(), self._rows).flatten(1).contiguous()
