"""The output head of an assistant with centroids: logits of the tokens that are near to what it reads.

The vocabulary is divided into clusters of as many tokens each, of which every one has a centroid. Those with
the largest scores are chosen, as experts are, and a cluster's rows of the head's weight are one of these. All
other tokens get -inf, so that none of them is ever drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ShapeMismatch
from plait.model.layers.expert_layers import bind_experts
from plait.ops.expert_heads import spread_heads
from plait.ops.moe import route
from plait.ops.rows import scatter_logits
from plait.spec.draft_heads import ClustersSpec
from plait.spec.model import RouterSpec

BY_SCORE = RouterSpec("sigmoid", renormalize=False, by_logits=True)  # the largest; their weights are not used


class CentroidHead:
    """Hidden states to logits.

    `w` has `router` (the centroids), `tokens` in the order of clusters, and of each one `experts.{e}.head`.
    """

    def __init__(self, s: ClustersSpec, w: Weights, hidden_size: int) -> None:
        self.spec, sizes = s, (hidden_size, s.size)
        self.tokens = read_clusters(s, w)
        self.centroids = w.linear("router", in_size=hidden_size, out_sizes=(s.count,))
        self._route = w.bind(route, num_experts=s.count, top_k=s.chosen, router=BY_SCORE)
        self._multiply, self.clusters = bind_experts(w, spread_heads, "head", sizes, s.count)
        self._scatter = w.bind(scatter_logits)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [L, hidden] -> [L, vocab] float32."""
        _, index = self._route(self.centroids(x), None, self.spec.chosen, BY_SCORE)
        logits: Tensor = self._scatter(self._multiply(x, index, self.clusters, 1), index, self.tokens)
        return logits


def read_clusters(s: ClustersSpec, w: Weights) -> Tensor:
    """The tokens of each cluster, [count, n] int64. Raises ShapeMismatch unless each token is there once."""
    vocab_size = s.count * s.size
    tokens = w.tensor("tokens", (vocab_size,), torch.int64)
    if not tokens.is_meta and not torch.equal(tokens.sort().values.cpu(), torch.arange(vocab_size)):
        raise ShapeMismatch(f"the clusters of tokens do not have each of {vocab_size} tokens once")
    return tokens.view(s.count, s.size)
