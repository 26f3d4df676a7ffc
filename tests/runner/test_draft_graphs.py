"""A draft model's steps are graphs of the device, and its drafts those of steps op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import Chip
from plait.request import SamplingParams
from plait.runner.device.graph_backends import TorchGraphs
from plait.runner.device.replay import DeviceReplay
from plait.runner.draft import DraftModel, Masks
from plait.runner.host.draft_memory import DraftMemory
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.schedule.drafts.turns import DraftRequest
from plait.state.store import StateStore
from tests.runner.device_engine import BLOCK, CHIP, CPU, LONGEST, gpu_decoder, plain_decoder

ONE = {"num_hidden_layers": 1}
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.2, top_k=20)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


def drafting(
    decoder: Decoder, chip: Chip | None, has_graphs: bool, places: int = 2, masks: Masks | None = None
) -> DraftModel:
    """A draft model with memory of its own, as `load_draft` makes it."""
    memory = DraftMemory(
        groups=block_groups(decoder.states),
        has_slots=has_slots(decoder.states),
        block_size=BLOCK,
        num_places=places,
        max_len=LONGEST,
        max_step_len=16,
    )
    store = StateStore(decoder.states, memory.num_blocks, memory.num_slots, BLOCK, CPU, torch.float32)
    for tensor in store.tensors:
        tensor.fill_(float("nan"))
        tensor[0] = 0  # where padding is
    sampler, graphs = Sampler(decoder.spec.vocab_size, chip=chip), TorchGraphs(chip) if has_graphs else None
    capacity = Capacity.of(memory.max_step_len, places, LONGEST, BLOCK, masks.most - 1 if masks else 0)
    runner = ModelRunner(decoder, store, sampler, CPU, executor=graphs, capacity=capacity if graphs else None)
    return DraftModel(runner, memory, masks)


def propose_all(
    draft: DraftModel, texts: Sequence[tuple[int, Sequence[int], int]]
) -> Mapping[int, tuple[int, ...]]:
    """Drafts of (sequence id, tokens, limit): even ones are greedy."""
    wanted = [
        DraftRequest(seq_id, tokens, limit, SAMPLED if seq_id % 2 else GREEDY, 7 + seq_id)
        for seq_id, tokens, limit in texts
    ]
    return draft.propose(wanted)


def check_drafts(decoder: Decoder, chip: Chip | None) -> None:
    """Calls in which drafts are right, wrong, and of one sequence or two, from graphs and op by op."""
    graphs, eager = drafting(decoder, chip, True), drafting(decoder, chip, False)
    first, second = [3, 5, 7, 2, 9], [11, 4]
    for turn in range(3):
        asked = [(0, first, 3), (1, second, 2 + turn)][: 2 if turn else 1]
        found = propose_all(graphs, asked)
        assert found == propose_all(eager, asked), turn
        assert all(len(found[seq_id]) == limit for seq_id, _, limit in asked)
        first = (
            [*first, *found[0], 1] if turn == 0 else [*first, found[0][0], 96]
        )  # then all but one are wrong
        second = [*second, 6]
    replay = graphs.runner.replay
    assert isinstance(replay, DeviceReplay)
    assert not replay._refused
    assert sorted({key.bucket for key in replay._graphs}) == [1, 2]


def test_drafts_of_captured_steps_are_those_of_steps_op_by_op(tmp_path: Path) -> None:
    check_drafts(gpu_decoder("llama", tmp_path / "llama of one layer", **ONE), CHIP)


def test_masks_are_drawn_in_captured_steps(tmp_path: Path) -> None:
    decoder, masks = gpu_decoder("llama", tmp_path / "llama of one layer", **ONE), Masks(5, 4)
    graphs, eager = (drafting(decoder, CHIP, has, masks=masks) for has in (True, False))
    texts = [[3, 5, 7], [11, 4]]
    for _ in range(3):
        asked = [(n, text, 3) for n, text in enumerate(texts)]
        found = propose_all(graphs, asked)
        assert found == propose_all(eager, asked)
        assert [len(draft) for draft in found.values()] == [3, 3]
        texts = [[*text, *found[n][:1], 6] for n, text in enumerate(texts)]
    replay = graphs.runner.replay
    assert isinstance(replay, DeviceReplay)
    assert replay.checks is not None
    assert replay.checks.graphs
    assert not replay.checks.refused


def test_so_are_those_of_recurrent_models(tmp_path: Path) -> None:
    """A second slot keeps the state before a draft. The references of these mixers can be captured, too."""
    check_drafts(plain_decoder("mamba2_plain", tmp_path / "mamba2"), None)
