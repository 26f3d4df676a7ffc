"""Gate E: the real runner and engine with torch's graphs for a GPU's give the text of steps op by op."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import Chip
from plait.runner.device.graph_backends import CapturedStep
from plait.runner.device.replay import DeviceReplay, GraphKey
from plait.schedule.plan import SamplingBatch, StepPlan, Ticket
from plait.schedule.pools import CacheOptions
from plait.schedule.speculate import Speculation
from plait.verify.matrix import CheapRows, CheapSteps, KnownReplies
from tests.families.every import NAMES
from tests.runner.device_engine import CHIP, Side, gpu_decoder, opaque_decoder, plain_decoder
from tests.runner.test_capture import NO_CODES

# One layer: Triton's interpreter takes most of a second for its step.
ONE = {"num_hidden_layers": 1}
EXPERTS = {"first_k_dense_replace": 0, "moe_intermediate_size": 8}
# Attention, latents with experts, Mamba1.
QUICK: dict[str, dict[str, int]] = {"llama": ONE, "deepseek_v3": {**ONE, **EXPERTS}, "mamba": ONE}
# Rows of a tile that are no queries divide 0 by 0, and are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
KEPT = (("llama", "bfloat16"), ("deepseek_v3", "int8"), ("deepseek_v3", "bfloat16"))
CAPTURED = [name for name in NAMES if name != "diffusion_gemma"]  # its passes run op by op
SAMPLE = ("sambay",)  # attention with a window, keys that layers share, Mamba1
PROMPTS = ([3, 5, 7], [11], [2, 9, 4, 4, 8], [17, 6])
FEW = 2  # requests of every family's model: the first ends, then its row is padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def replies(decoder: Decoder, has_graphs: bool, count: int) -> tuple[Side, dict[str, list[int]]]:
    """Requests for one place less, or for two; every second one draws."""
    side = Side(decoder, has_graphs, num_seqs=max(count - 1, FEW))
    for i, prompt in enumerate(PROMPTS[:count]):
        side.submit(f"r{i}", prompt, max_tokens=(2 if count == FEW else 3) + i % 2, temperature=0.9 * (i % 2))
    return side, side.finish()


@pytest.mark.sampled(2, across="captured steps")
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in QUICK]
)
def test_captured_steps_give_the_text_of_steps_op_by_op(name: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / f"{name} of one layer", **QUICK[name]))


@pytest.mark.sampled(2, across="captured steps")
@pytest.mark.parametrize(
    ("name", "kept"), [("llama", "int8"), *(pytest.param(*case, marks=pytest.mark.slow) for case in KEPT)]
)
def test_so_do_those_over_keys_and_values_of_another_dtype(name: str, kept: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / f"{name} of one layer", kept, **QUICK[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CAPTURED if name not in NO_CODES])
def test_so_do_those_of_every_family_over_codes(name: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / name, "int8"), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_so_do_those_of_every_family(name: str, folder: Path) -> None:
    agrees(gpu_decoder(name, folder / name), FEW)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURED]
)
def test_whatever_happens_to_captured_steps_the_text_is_that_of_steps_op_by_op(
    name: str, folder: Path
) -> None:
    check_events(opaque_decoder(name, folder / name))


def test_a_request_with_penalties_costs_others_no_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones make tables larger. All graphs were dropped then, and streams waited for new ones."""
    decoder = opaque_decoder("llama", folder / "llama")
    edits: list[dict[str, Any]] = [{}, {"presence_penalty": 0.7}, {"logit_bias": {5: 3.0}}, {}]
    texts, captured = [], list[GraphKey]()
    capture = DeviceReplay._capture

    def count_captures(self: DeviceReplay, key: GraphKey) -> CapturedStep:
        captured.append(key)
        return capture(self, key)

    monkeypatch.setattr(DeviceReplay, "_capture", count_captures)
    for has_graphs in (False, True):
        side = Side(decoder, has_graphs, chip=None, blocks=24)
        for turn, more in enumerate(edits):
            for i, prompt in enumerate(PROMPTS[:2]):
                side.submit(f"{turn}r{i}", prompt, temperature=0.9 * (turn != 2), **more)
            side.finish()
        texts.append(side.finish())
    assert texts[0] == texts[1]
    assert texts[0]["0r0"] == texts[0]["3r0"] != texts[0]["1r0"]
    assert len(captured) == len({(key.bucket, key.form and key.form[:2]) for key in captured})


LONGER, LENGTHS = ((2, 3, 5, 7, 11, 13, 17, 19, 23), (4, 9), (6, 8, 10, 12, 14)), (7, 6, 5)


def submit_longer(side: Side, turn: str = "") -> Side:
    for i, (prompt, length) in enumerate(zip(LONGER, LENGTHS, strict=True)):
        more = {"watched": False, "boundaries": tuple(at for at in (8,) if turn and at < len(prompt))}
        side.submit(f"{turn}r{i}", prompt, more=more, max_tokens=length, temperature=0.9 * (i % 2))
    return side


def fail_sometimes(side: Side) -> None:
    """Of the steps that several sequences share, one in three fails before it is launched."""
    launch, numbers = side.replay.launch, count()

    def broken(plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        if len(plan.chunks) > 1 and next(numbers) % 3 == 1:
            raise OSError("the device is lost for a moment")
        return launch(plan, sampling)

    side.replay.launch = broken  # type: ignore[method-assign]


def check_events(decoder: Decoder) -> None:
    """Several steps of a plan, faults, too little memory; then drafts, snapshots and prefixes."""
    want = submit_longer(Side(decoder, False, chip=None, blocks=24)).finish()
    has_blocks = bool(block_groups(decoder.states))
    side = Side(decoder, True, chip=None, blocks=5 if has_blocks else 24, budget=12, num_steps=4)
    side.engine.scheduler.costs = CheapSteps()
    fail_sometimes(side)
    assert submit_longer(side).finish() == want
    assert not side.replay._refused
    assert side.engine.metrics.num_failed_steps > 0
    if has_blocks:
        assert side.engine.stats()["num_preemptions"] > 0
    side = Side(decoder, True, chip=None, blocks=24, cache=CacheOptions(snapshot_interval=8))
    texts = [[*prompt, *want[f"r{i}"]] for i, prompt in enumerate(LONGER)]
    proposer = KnownReplies(texts, decoder.spec.vocab_size)
    has_drafts = decoder.spec.canvas is None
    if has_drafts:
        side.engine.speculation = Speculation(proposer, CheapRows(), 3, replays=True)
    for turn in "ab":  # the second time a prompt goes on from what the first left
        found = submit_longer(side, turn).finish()
        assert {name: found[turn + name] for name in want} == want
    if has_drafts and not has_slots(
        decoder.states
    ):  # else snapshots of prompts may take the slots that drafts want
        assert side.engine.metrics.num_accepted_tokens > 0
    assert side.engine.scheduler.cache_counts["hit_tokens"] > 0


def agrees(decoder: Decoder, count: int = len(PROMPTS)) -> None:
    _, want = replies(decoder, False, count)
    side, found = replies(decoder, True, count)
    assert found == want
    assert not side.replay._refused
    checks = side.replay.checks
    assert checks.graphs if decoder.spec.canvas and checks else side.replay._graphs


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
