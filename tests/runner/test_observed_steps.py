"""Captured steps show what a head of EAGLE-3 reads, as steps op by op do: of decodes, prompts and checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.model.eagle import ObservedDecoder, StateReader
from plait.runner.steps.replay import Observe
from plait.schedule.plan import StepPlan
from plait.schedule.speculate import Speculation
from plait.verify.matrix import CheapRows, KnownReplies
from tests.families import tiny
from tests.families.eagle_oracle import EagleOracle
from tests.families.parity import Memory, resolved
from tests.families.test_eagle import describe
from tests.runner.device_engine import BLOCK, CPU, LONGEST, Side
from tests.runner.opaque_ops import OpaqueWeights

PROMPTS = ([3, 5, 7], [11], [2, 9, 4, 4, 8, 1, 30])
Rows = dict[tuple[int, int], Tensor]  # by sequence and position: after a wrong draft token, the right one's


def observed(oracle: EagleOracle) -> ObservedDecoder:
    """The model, each op of which is a launch, with what a head reads of it."""
    config, tensors, _ = tiny.read(oracle.trunk_folder)
    checkpoint = Memory(tensors)
    model = resolved(checkpoint, config)
    target = Target(CPU, torch.float32, LONGEST, model.spec.hidden_size, "reference", block_size=BLOCK)
    spec, own = describe(oracle)
    made = ObservedDecoder(model.spec, OpaqueWeights(checkpoint, model.names, target))
    assert isinstance(own, Weights)
    made.reader = StateReader(spec, OpaqueWeights(own.checkpoint, own.names, target), model.spec)
    made.layers = made.reader.layers
    return made


def collect(rows: Rows) -> Observe:
    def keep(plan: StepPlan, hidden: Tensor) -> None:
        at = 0
        for chunk in plan.chunks:
            for i in range(len(chunk.token_ids)):
                rows[chunk.seq_id, chunk.start + i] = hidden[at + i].clone()
            at += len(chunk.token_ids)

    return keep  # type: ignore[return-value]  # rows of tensors alone


def run(side: Side) -> dict[str, list[int]]:
    for i, prompt in enumerate(PROMPTS):
        side.submit(f"r{i}", prompt, max_tokens=(9, 5, 7)[i], temperature=0.8 * (i % 2), seed=i)
    return side.finish()


@pytest.mark.sampled(2, across="captured steps")
def test_captured_steps_show_what_steps_op_by_op_show(tmp_path: Path) -> None:
    decoder = observed(EagleOracle("first", tmp_path))
    plain, wanted = Side(decoder, has_graphs=False), Rows()
    plain.runner.observe = collect(wanted)
    text = run(plain)
    for draft in (False, True):
        side, found = Side(decoder, has_graphs=True), Rows()
        if draft:
            known = [[*prompt, *text[f"r{i}"]] for i, prompt in enumerate(PROMPTS)]
            proposer = KnownReplies(known, decoder.spec.vocab_size)
            side.engine.speculation = Speculation(proposer, CheapRows(), 3, replays=True)
        side.replay.show(collect(found))
        assert run(side) == text
        assert not draft or side.replay.checks
        shown = {key: row for key, row in found.items() if key in wanted}
        assert shown.keys() == wanted.keys()
        for key, row in shown.items():
            torch.testing.assert_close(row, wanted[key], msg=str(key))
