"""Gate E: the real runner and engine with torch's graphs for a GPU's give the text of steps op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.model.decoder import Decoder
from plait.ops.chip import Chip
from plait.verify.matrix import CheapSteps
from tests.families import tiny
from tests.families.oracles import ORACLES
from tests.runner.device_engine import CHIP, Side, gpu_decoder, plain_decoder

# One layer: Triton's interpreter takes most of a second for its step.
ONE = {"num_hidden_layers": 1}
EXPERTS = {"first_k_dense_replace": 0, "moe_intermediate_size": 8}
# Attention, latents with experts, Mamba1.
QUICK: dict[str, dict[str, int]] = {"llama": ONE, "deepseek_v3": {**ONE, **EXPERTS}, "mamba": ONE}
# Rows of a tile that are no queries divide 0 by 0, and are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
PROMPTS = ([3, 5, 7], [11], [2, 9, 4, 4, 8], [17, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def replies(decoder: Decoder, has_graphs: bool, **options: int) -> tuple[Side, dict[str, list[int]]]:
    """Four requests for three places, of which two draw."""
    side = Side(decoder, has_graphs, **options)
    for i, prompt in enumerate(PROMPTS):
        side.submit(f"r{i}", prompt, max_tokens=3 + i % 2, temperature=0.9 * (i % 2))
    return side, side.finish()


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in QUICK]
)
def test_captured_steps_give_the_text_of_steps_op_by_op(name: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / f"{name} of one layer", **QUICK[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tiny.VARIANTS, *ORACLES])
def test_so_do_those_of_every_family(name: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / name))


def agrees(decoder: Decoder) -> None:
    _, want = replies(decoder, has_graphs=False)
    side, found = replies(decoder, has_graphs=True)
    assert found == want
    assert not side.replay._refused
    assert side.replay._graphs


def crowded(decoder: Decoder, has_graphs: bool, *, chip: Chip | None = CHIP, **options: Any) -> Side:
    """Three sequences in memory for little more than two: some are preempted, and computed again."""
    side = Side(decoder, has_graphs, chip=chip, blocks=5, budget=12, **options)
    for i, length in enumerate((9, 7, 8)):
        side.submit(f"r{i}", range(2 + i, 2 + i + length), max_tokens=6 - i, temperature=0.0)
    return side


@pytest.mark.slow
def test_sequences_that_are_preempted_between_captured_steps_get_the_same_text(folder: Path) -> None:
    decoder = gpu_decoder("llama", folder / "llama of one layer", **ONE)
    want = crowded(decoder, has_graphs=False).finish()
    side = crowded(decoder, has_graphs=True)
    assert side.finish() == want
    assert not side.replay._refused
    assert side.engine.stats()["num_preemptions"] > 0
    assert side.engine.num_ahead > 0


def test_so_do_they_without_graphs_but_ahead(folder: Path) -> None:
    """The references of attention ask for values, so nothing is captured; the host is ahead all the same."""
    decoder = plain_decoder("gemma3", folder / "gemma3")
    want = crowded(decoder, has_graphs=False, chip=None).finish()
    side = crowded(decoder, has_graphs=True, chip=None)
    assert side.finish() == want
    assert not side.replay._graphs
    assert side.engine.stats()["num_preemptions"] > 0
    assert side.engine.num_ahead > 5


@pytest.mark.slow
def test_several_replays_of_one_plan_are_as_many_steps(folder: Path) -> None:
    """Over the end of a block, without the host in between."""
    decoder = gpu_decoder("llama", folder / "llama of one layer", **ONE)
    found = []
    for num_steps in (1, 4):
        side = Side(decoder, has_graphs=True, num_seqs=2, num_steps=num_steps)
        side.engine.scheduler.costs = CheapSteps()
        for i in range(2):
            temperature = 0.7 * i
            more = {"watched": False}
            side.submit(f"r{i}", range(2, 7 + i), more=more, max_tokens=9, temperature=temperature)
        found.append(side.finish())
        assert not side.replay._refused
    assert found[0] == found[1]
    assert side.engine.metrics.num_steps_ahead > 0
