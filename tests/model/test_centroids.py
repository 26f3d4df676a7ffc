"""An output head with centroids: native kernels on every storage, compared with the head of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.families.gemma4_assistant import CENTROIDS, EMBEDDING, name_clusters
from plait.model.centroids import CentroidHead
from plait.ops.blocks import random_weight
from plait.ops.linear import Linear
from plait.ops.sample import sample
from plait.quant.weight import Dense
from plait.spec.draft_heads import ClustersSpec
from tests.families.parity import CPU, LONGEST, Memory

HIDDEN, SPEC = 256, ClustersSpec(6, 2, 10)
VOCAB, ROWS = SPEC.count * SPEC.size, 9
KINDS = ["Q4_1", "Q8_0", "Q6_K", "int4_g32", "fp8_b128", "bnb_nf4", "bfloat16"]


def build(kind: str, **target: Any) -> tuple[CentroidHead, Linear]:
    """A head with centroids, and the linear layer of all tokens with the same weight."""
    table = torch.randn(VOCAB, HIDDEN).bfloat16()
    tensors = {
        EMBEDDING: Dense(table) if kind == "bfloat16" else random_weight(kind, VOCAB, HIDDEN),
        f"{CENTROIDS[0]}.weight": torch.randn(SPEC.count, HIDDEN),
        CENTROIDS[1]: torch.randperm(VOCAB),
    }
    names = NameMap(name_clusters(SPEC, EMBEDDING, *CENTROIDS), {"embed": "model.embed_tokens"})
    weights = Weights(Memory(tensors), names, Target(CPU, torch.float32, LONGEST, HIDDEN, **target))
    head = CentroidHead(SPEC, weights.scope("clusters"), HIDDEN)
    return head, weights.linear("embed", in_size=HIDDEN, out_sizes=(VOCAB,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_have_the_bits_of_the_whole_head(cpu: Any, kind: str) -> None:
    """In one recorded program. A row has the same logits alone and in a batch."""
    head, whole = build(kind, executor=cpu, activations="int8")
    x = torch.randn(ROWS, HIDDEN)
    wanted = whole(x)
    with cpu.record(tokens=64, logits=ROWS) as program:
        made = head(x)
    for rows in (ROWS, 1):
        made.zero_()
        cpu.run(program, tokens=5, logits=rows, seqs=rows)
        found = made[:rows]
        there = found.isfinite()
        assert torch.all(there.sum(1) == SPEC.chosen * SPEC.size)
        assert torch.equal(found[there], wanted[:rows][there])
        assert torch.all(found[~there] == -torch.inf)


def test_references_choose_the_clusters_with_the_largest_scores() -> None:
    head, whole = build("Q8_0")
    x = torch.randn(ROWS, HIDDEN)
    found, wanted = head(x), whole(x)
    for row, scores in enumerate(head.centroids(x)):
        own = head.tokens[scores.topk(SPEC.chosen).indices].flatten()
        assert set(found[row].isfinite().nonzero()[:, 0].tolist()) == set(own.tolist())
        torch.testing.assert_close(found[row, own], wanted[row, own])


def test_no_token_of_another_cluster_is_drawn() -> None:
    """However flat the draw is."""
    head, _ = build("Q8_0")
    found = head(torch.randn(ROWS, HIDDEN)).repeat(50, 1)
    heat, every = torch.full((len(found),), 1e4).double(), torch.ones(len(found)).double()
    drawn = sample(found, heat, torch.zeros(len(found)).long(), every, 0 * every, torch.rand_like(every))
    assert torch.all(found.gather(1, drawn[:, None]).isfinite())
    assert len(drawn.unique()) > SPEC.size
