"""A model's own head, loaded: the same text with and without, and models without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import LLM, SamplingParams
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading import build
from plait.loading.build import Loaded, load
from plait.loading.draft_model import find_head, make_drafter
from plait.loading.meta.meta_model import Outline, meta_target
from plait.loading.open_model import open_model
from plait.loading.target import find_used_ops
from plait.model.mtp import MtpHead
from plait.ops.registry import REGISTRY
from plait.runner.host.mtp import MtpDrafter
from plait.runner.host.mtp_passes import HostPasses
from plait.runner.mtp_passes import EagerPasses
from plait.schedule.plan import Chunk, SamplingRow, StepPlan
from plait.state.store import StateStore
from plait.verify.tiny.models import write_model
from plait.verify.tiny.recurrent import RECURRENT

SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64
}  # fmt: skip
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.95)


@pytest.fixture(scope="module")
def hybrid(nano_hybrid: Path) -> Iterator[Loaded]:
    made = load(str(nano_hybrid), EngineConfig(speculate="mtp", **SIZES))
    yield made
    made.front.close(drain=False)


def drafting(model: Loaded) -> MtpDrafter:
    head = find_head(model.opened, model.target, model.runner.decoder)
    assert head is not None
    return make_drafter(head, model.target, model.config, 128, model.runner.sampler)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_recorded_passes_give_the_drafts_of_passes_op_by_op(hybrid: Loaded, params: SamplingParams) -> None:
    check_recorded_passes(hybrid, params)


def test_recorded_passes_of_a_head_that_passes_states_in_front_of_its_norm(tmp_path: Path) -> None:
    write_model(RECURRENT["norm-gates"], tmp_path)
    made = load(str(tmp_path), EngineConfig(speculate="mtp", **SIZES))
    try:
        check_recorded_passes(made, GREEDY)
    finally:
        made.front.close(drain=False)


def check_recorded_passes(model: Loaded, params: SamplingParams) -> None:
    drafter, size = drafting(model), model.opened.resolved.spec.hidden_size
    assert isinstance(drafter.passes, HostPasses)
    rows = [torch.randn(1, size), torch.randn(5, size)]
    chunks = tuple(
        Chunk(n, 0, tuple(range(7, 7 + len(row))), drafter.memory.tables(n, 0, 24), 0, 1)
        for n, row in enumerate(rows)
    )
    sampling = [SamplingRow(params, 1, 1, position, 3) for position in (2, 6)]
    plan = StepPlan(1, chunks)
    made = drafter.passes.run(plan, rows, sampling, 3)
    eager = eager_passes(model, drafter)
    assert eager.run(plan, rows, sampling, 3) == made


def eager_passes(model: Loaded, drafter: MtpDrafter) -> EagerPasses:
    """Of the same head, in memory of its own."""
    head = find_head(model.opened, model.target, model.runner.decoder)
    assert head is not None
    memory, target = drafter.memory, model.target
    store = StateStore(head.states, memory.num_blocks, 0, memory.block_size, target.device, target.dtype)
    return EagerPasses(head, store, model.runner.sampler, target.device)


def test_text_is_the_same_with_its_own_head_as_without(nano_hybrid: Path) -> None:
    """Greedy, drawn, several choices and a second turn that the prefix cache knows."""
    prompts = ["And it came to pass in those days, that", "<|user|>Tell me of David.<|assistant|>"]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40, n=n) for t, n in ((0.0, 1), (0.9, 2))]
    found = []
    for words in ({}, {"speculate": "mtp", "num_draft_tokens": 3}):
        with LLM(str(nano_hybrid), **SIZES, **words) as llm:
            first = llm.generate(prompts, params)
            longer = [p + first[0].outputs[0].text for p in prompts]
            outputs = [*first, *llm.generate(longer, params)]
            found.append([[tuple(c.token_ids) for c in out.outputs] for out in outputs])
    assert found[0] == found[1]


def test_model_without_a_head_is_refused_in_one_line(nano_hybrid: Path, tmp_path: Path) -> None:
    for file in nano_hybrid.iterdir():
        if file.name != "mtp.safetensors":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="has no head for multi-token prediction in a layout that Plait"):
        load(str(tmp_path), EngineConfig(speculate="mtp", **SIZES))


@pytest.mark.parametrize("word", ["mtp", "/nowhere"])
def test_a_gpu_tries_no_kernel_for_a_model_that_can_have_no_such_drafts(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(nano_hybrid / name)
    monkeypatch.setattr(build, "try_kernels", lambda *_: pytest.fail("it takes minutes"))
    opened = open_model(str(tmp_path), EngineConfig(speculate=word))
    target = Target(torch.device("cuda"), torch.float32, 64, 32)
    with pytest.raises(ConfigError, match="speculate: "):
        build._build_for(target, opened, lambda *_: None, lambda _: None)


@pytest.mark.parametrize("word", ["mtp", "off"])
def test_a_gpu_tries_the_kernels_of_a_model_and_its_head_and_no_others(nano_hybrid: Path, word: str) -> None:
    """Without drafts, too: `plait verify` runs the head of a model that was loaded so."""
    opened = open_model(str(nano_hybrid), EngineConfig(speculate=word))
    spec, names, outline = opened.resolved.spec, opened.resolved.names, Outline(opened.checkpoint)
    target = meta_target(spec)
    head = MtpHead(spec, Weights(outline, names, target), None)
    of_head, tried = {row.op for row in target.bound}, find_used_ops(opened).keys()
    assert head.branches
    assert "join" in of_head
    assert of_head <= tried < REGISTRY.keys()
