"""A head of EAGLE-3 or P-EAGLE that drafts for a model: the same text with and without, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import SamplingParams
from plait.config import EngineConfig
from plait.errors import ConfigError, UnsupportedModel, UnusedTensor
from plait.loading import build
from plait.loading.build import Loaded, load
from plait.loading.draft_heads import find_spec, list_head_ops, load_draft_head
from plait.loading.draft_model import open_draft
from plait.loading.open_model import open_model
from plait.model.eagle import EagleHead, ObservedDecoder
from plait.ops.registry import REGISTRY
from plait.runner.block_passes import EagerMaskedPasses
from plait.runner.host.block_passes import HostMaskedPasses
from plait.runner.host.mtp_passes import HostPasses
from plait.runner.host.program import ProgramReplay
from plait.runner.host.turns import NativeTurns
from plait.runner.mtp_passes import EagerPasses
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.eagle_oracle import VOCAB, EagleOracle
from tests.loading.head_texts import compare_texts

SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "dtype": "float32",
}  # fmt: skip
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.95)
NAMES = ["first", "speculators", "parallel"]


class Published:
    """A model, and a head for it, as directories."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = EagleOracle(name, folder)
        self.model, self.head = self.oracle.trunk_folder, self.oracle.write(folder / "head")

    def load(self, **options: Any) -> Loaded:
        return load(str(self.model), EngineConfig(speculate=str(self.head), **SIZES, **options))


@pytest.fixture(scope="module", params=NAMES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published("first", tmp_path_factory.mktemp("first"))


@pytest.fixture
def loaded(published: Published) -> Iterator[Loaded]:
    made = published.load()
    yield made
    made.front.close(drain=False)


def test_text_is_the_same_with_a_head_as_without(published: Published) -> None:
    compare_texts(published.model, published.head, SIZES, most=3, longest=90)


@pytest.mark.parametrize("options", [{}, {"ops": "reference"}], ids=["native", "reference"])
def test_drafts_are_those_of_the_reference(published: Published, options: dict[str, str]) -> None:
    """Of references the very tokens; native ones have weights in five bits, and draft tokens it knows."""
    oracle = published.oracle
    made = published.load(**options)
    try:
        drafter = made.drafter
        assert drafter is not None
        ids = [5, 17, 3, 88, 41, 6]
        chunk = Chunk(1, 0, tuple(ids[:-1]), ((1, 2),), 0, 1)
        shown = oracle.observe(torch.tensor(ids[:-1]))
        drafter.observe(StepPlan(1, (chunk,)), shown)
        found = drafter.propose([DraftRequest(1, tuple(ids), 4, GREEDY, 0)])
        if options:
            assert found == {1: tuple(oracle.draft(torch.tensor(ids[1:]), shown, 4).tolist())}
        assert set(found[1]) <= set(oracle.tokens.tolist()), "tokens that the head knows"
    finally:
        made.front.close(drain=False)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_recorded_passes_give_the_drafts_of_passes_op_by_op(loaded: Loaded, params: SamplingParams) -> None:
    drafter, target = loaded.drafter, loaded.target
    assert drafter is not None
    assert isinstance(drafter.passes, HostPasses | HostMaskedPasses)
    draft = open_draft(loaded.config, loaded.front.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    head = load_draft_head(draft, spec, loaded.opened, target, loaded.runner.decoder)
    memory = drafter.memory
    store = StateStore(head.states, memory.num_blocks, 0, memory.block_size, target.device, target.dtype)
    where = head, store, loaded.runner.sampler, target.device
    assert isinstance(head, EagleHead)
    form = getattr(drafter.passes, "form", None)
    eager = EagerMaskedPasses(*where, form) if form else EagerPasses(*where)
    rows = [torch.randn(1, head.width), torch.randn(5, head.width)]
    chunks = tuple(
        Chunk(n, 0, tuple(range(7, 7 + len(row))), memory.tables(n, 0, 24), 0, 1)
        for n, row in enumerate(rows)
    )
    sampling = [SamplingRow(params, 1, 1, position, 3) for position in (2, 6)]
    plan = StepPlan(1, chunks)
    assert eager.run(plan, rows, sampling, 3) == drafter.passes.run(plan, rows, sampling, 3)


def test_a_step_with_what_a_head_reads_is_recorded(loaded: Loaded) -> None:
    """Turns run draft tokens one by one, so they are not of a head that makes all in one pass."""
    replay = loaded.runner.replay
    assert isinstance(loaded.runner.decoder, ObservedDecoder)
    assert isinstance(replay, ProgramReplay)
    assert loaded.drafter is not None
    assert isinstance(replay.turns, NativeTurns) == isinstance(loaded.drafter.passes, HostPasses)
    assert replay.program.results.for_head is not replay.program.results.hidden


def test_a_head_alone_is_no_model(first: Published) -> None:
    with pytest.raises(UnsupportedModel, match=r"head of EAGLE-3: it drafts for .* --speculate"):
        open_model(str(first.head), EngineConfig())


def test_a_head_of_another_model_is_refused_before_weights_are_read(
    first: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(
        "qwen3", tmp_path, replace(tiny.VARIANTS["qwen3"], changes={"vocab_size": VOCAB, "hidden_size": 48})
    )
    monkeypatch.setattr(build, "load_decoder", lambda *_: pytest.fail("weights take minutes"))
    with pytest.raises(ConfigError, match="speculate: the head reads states of 32 numbers, and this model's"):
        load(str(tmp_path), EngineConfig(speculate=str(first.head), **SIZES))


def test_a_head_is_refused_next_to_adapters(first: Published, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafts from the model without adapters; with lora choose ngram"):
        first.load(lora_folder=str(tmp_path))


def test_a_tensor_that_a_head_does_not_use_is_refused(first: Published, tmp_path: Path) -> None:
    oracle = first.oracle
    tiny.save_file(
        {**oracle.tensors, "layers.1.mlp.up_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(oracle.config))
    with pytest.raises(UnusedTensor, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(str(first.model), EngineConfig(speculate=str(tmp_path), **SIZES))


def test_a_head_of_the_first_eagles_is_refused_by_name(first: Published, tmp_path: Path) -> None:
    """It says that it is a Llama of one layer."""
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight")
    tensors = {"fc.weight": torch.ones(32, 64), **{name: torch.ones(32, 32) for name in names}}
    tiny.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({**first.oracle.config, "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(UnsupportedModel, match="a head of EAGLE 1 or 2, which is not implemented"):
        load(str(first.model), EngineConfig(speculate=str(tmp_path), **SIZES))


def test_a_gpu_tries_what_a_head_binds(published: Published) -> None:
    config = EngineConfig(speculate=str(published.head), **SIZES)
    opened = open_model(str(published.model), config)
    draft = open_draft(config, opened.resolved.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    tried = list_head_ops(draft, spec, opened).keys()
    assert {"join", "pick_columns", "paged_attention", "linear", "add_rms_norm"} <= tried
    assert tried < REGISTRY.keys()
