"""A head of DFlash that drafts for a model: the same text with and without, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.errors import ConfigError, UnsupportedModel, UnusedTensor
from plait.loading import build
from plait.loading.build import Loaded, load
from plait.loading.draft_heads import find_spec, list_head_ops, load_draft_head
from plait.loading.draft_model import open_draft
from plait.loading.make_engine import list_lengths
from plait.loading.open_model import open_model
from plait.model.dflash import DFlashHead
from plait.ops.registry import REGISTRY
from plait.runner.block_passes import EagerBlockPasses
from plait.runner.host import mtp
from plait.runner.host.block_passes import HostBlockPasses
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.dflash_oracle import DFlashOracle
from tests.loading.head_texts import compare_texts

SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "dtype": "float32",
}  # fmt: skip
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.95)


class Published:
    """A model, and a head for it, as directories."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = DFlashOracle(name, folder)
        self.model, self.head = self.oracle.trunk_folder, self.oracle.write(folder / "head")

    def load(self, **options: Any) -> Loaded:
        return load(str(self.model), EngineConfig(speculate=str(self.head), **SIZES, **options))


@pytest.fixture(scope="module", params=["windows", "speculators", "DSpark", "DFlash2"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published("z-lab", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=["z-lab", "DSpark", "DFlash2"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def loaded(published: Published) -> Iterator[Loaded]:
    made = published.load()
    yield made
    made.front.close(drain=False)


def test_text_is_the_same_with_a_head_as_without(published: Published) -> None:
    compare_texts(published.model, published.head, SIZES, most=5, longest=120)  # of 128


@pytest.mark.parametrize("options", [{}, {"ops": "reference"}], ids=["native", "reference"])
def test_drafts_are_those_of_the_reference(whole: Published, options: dict[str, str]) -> None:
    """Of references the very tokens; native ones have weights in five bits."""
    oracle, made = whole.oracle, whole.load(**options)
    try:
        drafter = made.drafter
        assert drafter is not None
        assert drafter.most == 7, "as many as a block has, though 8 may be drafted"
        ids = [5, 17, 3, 88, 41, 6]
        shown = oracle.observe(torch.tensor(ids[:-1]))
        drafter.observe(StepPlan(1, (Chunk(1, 0, tuple(ids[:-1]), ((1, 2),), 0, 1),)), shown)
        found = drafter.propose([DraftRequest(1, tuple(ids), 8, GREEDY, 0)])
        assert len(found[1]) == 7
        if options:
            assert found == {1: tuple(oracle.draft_tokens(shown, ids[-1], 7))}
    finally:
        made.front.close(drain=False)


def test_a_head_sees_all_of_a_long_text(whole: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, of which more is kept than waits for a draft, then a draft and what was right."""
    monkeypatch.setattr(mtp, "MOST_KEPT", 9)
    oracle, made = whole.oracle, whole.load(ops="reference")
    try:
        drafter, ids = made.drafter, [*range(3, 80)]
        assert drafter is not None
        shown = oracle.observe(torch.tensor(ids))
        for start, end in ((0, 30), (30, 33), (33, 60), (60, 61)):
            chunk = Chunk(1, start, tuple(ids[start:end]), ((1, 2, 3, 4, 5),), 0, 1)
            drafter.observe(StepPlan(1, (chunk,)), shown[start:end])
        for end in (61, 64):
            found = drafter.propose([DraftRequest(1, tuple(ids[: end + 1]), 5, GREEDY, 0)])
            assert found == {1: tuple(oracle.draft_tokens(shown[:end], ids[end], 5))}
            chunk = Chunk(1, 61, tuple(ids[61:67]), ((1, 2, 3, 4, 5),), 0, 6)
            drafter.observe(StepPlan(2, (chunk,)), shown[61:67])
    finally:
        made.front.close(drain=False)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_recorded_passes_give_the_drafts_of_passes_op_by_op(loaded: Loaded, params: SamplingParams) -> None:
    drafter, target = loaded.drafter, loaded.target
    assert drafter is not None
    assert isinstance(drafter.passes, HostBlockPasses)
    draft = open_draft(loaded.config, loaded.front.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    head = load_draft_head(draft, spec, loaded.opened, target, loaded.runner.decoder)
    assert isinstance(head, DFlashHead)
    memory = drafter.memory
    store = StateStore(head.states, memory.num_blocks, 0, memory.block_size, target.device, target.dtype)
    passes = drafter.passes
    eager = EagerBlockPasses(head, store, loaded.runner.sampler, target.device, passes.form)
    rows = [torch.randn(1, head.width), torch.randn(5, head.width)]
    chunks = tuple(
        Chunk(n, 0, tuple(range(7, 7 + len(row))), memory.tables(n, 0, 24), 0, 1)
        for n, row in enumerate(rows)
    )
    sampling = [SamplingRow(params, 1, 1, position, 3) for position in (2, 6)]
    plan = StepPlan(1, chunks)
    for length in (3, 7, 1):
        assert eager.run(plan, rows, sampling, length) == drafter.passes.run(plan, rows, sampling, length)


def test_sequences_do_not_change_each_others_drafts(loaded: Loaded) -> None:
    drafter = loaded.drafter
    assert drafter is not None
    memory, width = drafter.memory, loaded.target.drafts.hidden_size
    chunks = [Chunk(n, 0, (7, 8, 9), memory.tables(n, 0, 24), 0, 1) for n in range(3)]
    rows, row = [torch.randn(3, width) for _ in chunks], SamplingRow(DRAWN, 1, 1, 4, 3)
    together = drafter.passes.run(StepPlan(1, tuple(chunks)), rows, [row] * 3, 4)
    alone = [
        drafter.passes.run(StepPlan(1, (c,)), [r], [row], 4)[0] for c, r in zip(chunks, rows, strict=True)
    ]
    assert together == alone
    assert len({*together}) == 3


def test_a_head_alone_is_no_model(plain: Published) -> None:
    with pytest.raises(UnsupportedModel, match=r"head of DFlash: it drafts for .* --speculate"):
        open_model(str(plain.head), EngineConfig())


def test_a_head_is_refused_next_to_adapters(plain: Published, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafts from the model without adapters; with lora choose ngram"):
        plain.load(lora_folder=str(tmp_path))


def test_a_tensor_that_a_head_does_not_use_is_refused(plain: Published, tmp_path: Path) -> None:
    oracle = plain.oracle
    tiny.save_file(
        {**oracle.tensors, "layers.2.mlp.up_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(oracle.config))
    config = EngineConfig(speculate=str(tmp_path), **SIZES)
    wanted = rf"speculate: {tmp_path.name}: .*layers\.2\.mlp\.up_proj\.weight"
    with pytest.raises(UnusedTensor, match=wanted):
        load(str(plain.model), config)
    opened = open_model(str(plain.model), config)
    draft = open_draft(config, opened.resolved.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    with pytest.raises(UnusedTensor, match=wanted):  # as `plait info` does
        list_head_ops(draft, spec, opened)


def test_tokens_that_are_never_drawn_are_no_candidates(
    whole: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 97 tokens 57 are banned: often all of the likeliest few."""
    monkeypatch.setattr(build, "banned_ids", lambda *_: tuple(range(40, 97)))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found = []
    for words in ({}, {"speculate": str(whole.head)}):
        with LLM(str(whole.model), **SIZES, **words) as llm:
            outputs = llm.generate([[1, 2, 3], [4, 5], [9, 8, 7]], params)
            found.append([tuple(out.outputs[0].token_ids) for out in outputs])
            drafts = llm.front.loop.engine.speculation  # type: ignore[attr-defined]
            assert not words or (drafts.num_drafted > 0 and drafts.error is None)
    assert found[0] == found[1]


@pytest.mark.parametrize(("most", "lengths"), [(1, [1]), (2, [2]), (5, [3, 4, 5]), (40, [3, 4, 6, 7])])
def test_lengths_that_are_tried_end_with_the_longest(plain: Published, most: int, lengths: list[int]) -> None:
    made = plain.load(num_draft_tokens=most)
    try:
        assert made.drafter is not None
        assert list_lengths(made.drafter, most) == lengths
    finally:
        made.front.close(drain=False)


def test_a_gpu_tries_what_a_head_binds(published: Published) -> None:
    config = EngineConfig(speculate=str(published.head), **SIZES)
    opened = open_model(str(published.model), config)
    draft = open_draft(config, opened.resolved.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    tried = list_head_ops(draft, spec, opened).keys()
    assert {"paged_attention", "linear", "add_rms_norm", "take_rows"} <= tried
    assert tried < REGISTRY.keys()
