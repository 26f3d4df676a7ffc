"""Heads for multi-token prediction of every family that has one, against the reference of the papers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.memory import block_groups
from plait.model.mtp import FC, MtpHead
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore
from tests.checkpoint.readers.damage import bounded
from tests.families.mtp_oracle import LAYOUTS, MtpOracle
from tests.families.parity import CPU, LONGEST, Memory, decoder, resolved, whole, worst

TOLERANCE = 1e-4
QUICK = {"deepseek_v3", "qwen3_next"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]


Case = tuple[MtpOracle, MtpHead]


class HeadSession:
    """One sequence of a head, in memory of its own."""

    def __init__(self, head: MtpHead) -> None:
        self.head, self.groups = head, block_groups(head.states)
        self.store = StateStore(head.states, {g.name: 9 for g in self.groups}, 0, 4, CPU, torch.float32)
        for tensor in self.store.tensors:
            tensor.fill_(float("nan"))

    @torch.inference_mode()
    def step(self, start: int, ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """(what the head makes of every row, logits of every row)."""
        table = tuple(range(8, 0, -1))
        chunk = Chunk(0, start, tuple(ids.tolist()), (table,) * len(self.groups), 0, len(ids))
        batch = build_batch(StepPlan(0, (chunk,)), self.groups, 4, CPU)
        before = before.clone()
        hidden = self.head.compute(batch, self.store, before)
        return hidden, self.head.logits(self.head.keep_last(hidden, batch, before))


@pytest.fixture(scope="module", params=NAMES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MtpOracle, MtpHead]:
    oracle = MtpOracle(request.param, tmp_path_factory.mktemp(request.param))
    checkpoint = Memory(oracle.tensors)
    found = resolved(checkpoint, oracle.config)
    trunk = decoder(found, checkpoint)  # which leaves the head's tensors aside
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    weights = Weights(checkpoint, found.names, target)
    assert FC in weights
    ids = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(2))
    plain = oracle.logits(ids)
    assert worst(whole(trunk, ids), plain) <= TOLERANCE
    return oracle, MtpHead(found.spec, weights, trunk)


def test_logits_of_a_head_are_the_reference_s(case: Case) -> None:
    oracle, head = case
    ids = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(3))
    hidden = oracle.trunk(ids)[:-1]
    wanted, logits = oracle.outputs(oracle.inputs(ids[1:], hidden))
    made, found = HeadSession(head).step(0, ids[1:], hidden)
    assert worst(made, wanted) <= TOLERANCE
    assert worst(found, logits) <= TOLERANCE


def test_head_goes_on_from_what_it_made_itself(case: Case) -> None:
    """Chunks, then drafts one by one, over keys and values of its own."""
    oracle, head = case
    ids = torch.randint(0, 97, (14,), generator=torch.Generator().manual_seed(4))
    hidden = oracle.trunk(ids)[:-1]
    x = oracle.inputs(ids[1:], hidden)
    session = HeadSession(head)
    for start, end in ((0, 6), (6, 7), (7, 13)):
        made, found = session.step(start, ids[1 + start : 1 + end], hidden[start:end])
    for at in range(13, 16):
        wanted, logits = oracle.outputs(x)
        assert worst(found[-1], logits[-1]) <= TOLERANCE
        token = logits[-1:].argmax(-1)
        x = torch.cat([x, oracle.inputs(token, wanted[-1:])])
        made, found = session.step(at, token, made[-1:])


def test_numbers_of_heads_that_cannot_be_are_refused(tmp_path: Path) -> None:
    oracle = MtpOracle("deepseek_v3", tmp_path)
    checkpoint = Memory(oracle.tensors)
    for count in (-1, 65, 2**26):
        with bounded(), pytest.raises(UnsupportedModel, match="num_nextn_predict_layers"):
            resolved(checkpoint, {**oracle.config, "num_nextn_predict_layers": count})
    assert resolved(checkpoint, {**oracle.config, "num_nextn_predict_layers": 64}).spec.mtp is not None
    assert resolved(checkpoint, {**oracle.config, "num_nextn_predict_layers": 0}).spec.mtp is None
