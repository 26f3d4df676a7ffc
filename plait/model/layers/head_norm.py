"""The norms of queries and keys: over a head, each head with a weight of its own, or all heads at once."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Norm
from plait.ops.place import NormWeights
from plait.quant.weight import as_tensor
from plait.spec.model import AttentionSpec, NormSpec


class HeadNorm:
    """The norm of a mixer's queries or keys, over whatever `qk_norm_over` says: [T, heads, d] -> its like.

    Where it is over the heads of all ranks, these are gathered.
    """

    def __init__(self, norm: NormSpec, s: AttentionSpec, w: Weights, heads: int) -> None:
        self._apart = s.qk_norm_over == "head"
        size = s.head_dim if self._apart else heads * s.head_dim
        self._heads: SharedHeads | None = None
        if s.qk_norm_over == "all" and w.target.comm.rank.size > 1:
            self._heads = SharedHeads(w, s.head_dim, heads, as_tensor(w.read("weight")).numel() // s.head_dim)
            size = self._heads.size
        self._norm = Norm(norm, w, size, heads if s.qk_norm_over == "each" else 1)

    @property
    def is_gathered(self) -> bool:
        """Whether it is over the heads of other ranks, too."""
        return self._heads is not None

    @property
    def weights(self) -> NormWeights:
        """For ops that norm and do more."""
        return self._norm.weights

    def __call__(self, x: Tensor) -> Tensor:
        if self._heads:
            return self._heads.pick(self._norm(self._heads.gather(x.flatten(1)))).view(x.shape)
        return self._norm(x) if self._apart else self._norm(x.flatten(1)).view(x.shape)


class SharedHeads:
    """The heads of all ranks, each once: several ranks have the same one where there are too few."""

    def __init__(self, w: Weights, dim: int, heads: int, of: int) -> None:
        """heads: of this rank; of: of all ranks."""
        self._comm, self._own, self.size = w.target.comm, heads * dim, of * dim
        self._repeats = self._own * self._comm.rank.size // self.size  # ranks that have the same heads

    def gather(self, x: Tensor) -> Tensor:
        """[T, heads of this rank · d] -> [T, all heads · d]."""
        return torch.cat(list(self._comm.gather(x.contiguous()))[:: self._repeats], -1)

    def pick(self, x: Tensor) -> Tensor:
        """The way back."""
        start = self._comm.rank.index // self._repeats * self._own
        return x[..., start : start + self._own].contiguous()
