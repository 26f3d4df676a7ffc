"""Gemma 4's assistant drafts over its model's memory: the same text with and without, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.engine.thread import EngineLoop
from plait.errors import ConfigError, UnsupportedModel
from plait.loading import build
from plait.loading.build import Loaded, load
from plait.loading.draft_heads import find_spec, list_head_ops, load_draft_head
from plait.loading.draft_model import open_draft
from plait.loading.image.write import keep_image
from plait.loading.open_model import open_model
from plait.ops.registry import REGISTRY
from plait.runner.host.assistant import AssistantDrafter
from plait.runner.host.mtp_passes import HostPasses
from plait.runner.host.program import ProgramReplay
from plait.runner.mtp_passes import EagerPasses
from plait.runner.steps.inputs import build_batch
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan
from plait.spec.draft_heads import AssistantSpec
from tests.families import tiny
from tests.families.assistant_oracle import VOCAB, WINDOW, AssistantOracle
from tests.families.test_latent import write_gguf
from tests.loading.head_texts import compare_texts

SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "dtype": "float32",
}  # fmt: skip
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.95)
NAMES = ["keys as values", "shared keys", "clusters", "clusters of an own head"]


@pytest.fixture(scope="module", params=NAMES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle(NAMES[0], tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle("clusters", tmp_path_factory.mktemp("clustered"))


def load_pair(pair: AssistantOracle, **options: Any) -> Loaded:
    return load(str(pair.model_folder), EngineConfig(speculate=str(pair.head_folder), **{**SIZES, **options}))


@pytest.fixture
def loaded(published: AssistantOracle) -> Iterator[Loaded]:
    made = load_pair(published)
    yield made
    made.front.close(drain=False)


def test_text_is_the_same_with_a_head_as_without(published: AssistantOracle) -> None:
    compare_texts(published.model_folder, published.head_folder, SIZES, most=3, longest=90)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], tuple[int, ...]]]:
    """The drafts that engines are given from now on, each with the tokens before it."""
    found: list[tuple[list[int], tuple[int, ...]]] = []
    propose = AssistantDrafter.propose

    def propose_watched(self: AssistantDrafter, wanted: Sequence[DraftRequest]) -> Any:
        made = propose(self, wanted)
        known = {one.seq_id: list(one.token_ids) for one in wanted}
        found.extend((known[seq_id], draft) for seq_id, draft in made.items())
        return made

    monkeypatch.setattr(AssistantDrafter, "propose", propose_watched)
    return found


@pytest.mark.parametrize("kind", ["whole", "in chunks", "GGUF", "clusters"])
def test_drafts_in_an_engine_are_those_of_transformers(
    first: AssistantOracle, clustered: AssistantOracle, kind: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of several sequences: behind prompts in one chunk and in several, wrong drafts, cached prefixes."""
    found, first = watch(monkeypatch), clustered if kind == "clusters" else first
    words = {**SIZES, "ops": "reference", "num_draft_tokens": 3}
    words |= {"max_num_batched_tokens": 5} if kind == "in chunks" else {}
    head = write_gguf(tmp_path / "head.gguf", *first.as_gguf()) if kind == "GGUF" else first.head_folder
    prompts = [[*range(3, 40)], [3, 4, 5, 6, 7, 8, 9, 10, 11], [9, 1, 2], [5]]
    with LLM(str(first.model_folder), speculate=str(head), **words) as llm:
        for _ in range(2):  # then the cache has a prefix of the first
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert len(found) > 40
    assert {len(ids) > WINDOW for ids, _ in found} == {True, False}
    for ids, draft in found:
        assert first.draft(torch.tensor(ids), len(draft))[2] == list(draft)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_recorded_passes_give_the_drafts_of_passes_op_by_op(loaded: Loaded, params: SamplingParams) -> None:
    """Over the model's memory: of a sequence with one token there, and of a longer one."""
    drafter, runner, target = find_drafter(loaded), loaded.runner, loaded.target
    assert isinstance(drafter.passes, HostPasses)
    draft = open_draft(loaded.config, loaded.front.spec, None)
    spec = find_spec(draft)
    assert spec is not None
    head = load_draft_head(draft, spec, loaded.opened, target, runner.decoder)
    eager = EagerPasses(head, runner.store, runner.sampler, target.device)
    tables = [((2 * n + 1, 2 * n + 2),) * len(head.groups) for n in range(2)]
    prompts = [Chunk(n, 0, tuple(range(7, 7 + c)), tables[n], 0, 1) for n, c in enumerate((21, 1))]
    plan = StepPlan(1, tuple(prompts))
    runner.decoder.hidden(
        build_batch(plan, head.groups, runner.store.block_size, target.device), runner.store
    )
    rows = [torch.randn(1, head.width) for _ in prompts]
    chunks = tuple(Chunk(n, c.end - 1, (5,), tables[n], 0, 1) for n, c in enumerate(prompts))
    sampling = [SamplingRow(params, 1, 1, chunk.end + 1, 3) for chunk in chunks]
    plan = StepPlan(2, chunks)
    assert eager.run(plan, rows, sampling, 3) == drafter.passes.run(plan, rows, sampling, 3)


def find_drafter(loaded: Loaded) -> AssistantDrafter:
    loop = loaded.front.loop
    assert isinstance(loop, EngineLoop)
    assert loop.engine.speculation is not None
    drafter = loop.engine.speculation.proposer
    assert isinstance(drafter, AssistantDrafter)
    return drafter


def test_draft_from_blocks_of_another_sequence_changes_no_text(
    first: AssistantOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that are old are of the same store: here every draft is made from other blocks."""
    prompts = [[3, 4, 5, 6, 7, 8], [9, 1, 2]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    observe, found = AssistantDrafter.observe, []

    def observe_wrong(self: AssistantDrafter, plan: StepPlan, hidden: Any) -> None:
        """Each sequence's tables are the next one's."""
        chunks, turned = plan.chunks, [*plan.chunks[1:], plan.chunks[0]]
        wrong = [structs.replace(c, blocks=other.blocks) for c, other in zip(chunks, turned, strict=True)]
        observe(self, replace(plan, chunks=tuple(wrong)), hidden)

    for options in ({}, {"speculate": str(first.head_folder)}):
        with LLM(str(first.model_folder), **SIZES, **options) as llm:
            found.append([tuple(c.outputs[0].token_ids) for c in llm.generate(prompts, params)])
        monkeypatch.setattr(AssistantDrafter, "observe", observe_wrong)
    assert found[0] == found[1]


def test_a_head_alone_is_no_model(first: AssistantOracle) -> None:
    with pytest.raises(UnsupportedModel, match=r"an assistant of Gemma 4: it drafts for .* --speculate"):
        open_model(str(first.head_folder), EngineConfig())


def test_a_head_of_another_model_is_refused_before_weights_are_read(
    first: AssistantOracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(tiny.VARIANTS["qwen3"], changes={"vocab_size": VOCAB, "hidden_size": 48})
    tiny.write("qwen3", tmp_path, changed)
    monkeypatch.setattr(build, "load_decoder", lambda *_: pytest.fail("weights take minutes"))
    with pytest.raises(ConfigError, match="speculate: the head reads states of 32 numbers, and this model's"):
        load(str(tmp_path), EngineConfig(speculate=str(first.head_folder), **SIZES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_folder": "/adapters"}, "drafts from the model without adapters; with lora choose ngram"),
        (
            {"tensor_parallel_size": 2},
            "reads the keys of one rank, and there are 2; with several ranks choose ngram",
        ),
    ],
)
def test_a_head_is_refused_where_it_cannot_draft(
    first: AssistantOracle, options: dict[str, Any], message: str
) -> None:
    config = EngineConfig(speculate=str(first.head_folder), **SIZES, **options)
    opened = open_model(str(first.model_folder), config)
    with pytest.raises(ConfigError, match=message):
        build.draft_headers(opened, None)


def test_it_has_no_turns_and_no_startup_image(loaded: Loaded) -> None:
    assert isinstance(replay := loaded.runner.replay, ProgramReplay)
    assert replay.turns is None
    assert (
        keep_image(loaded, 1 << 30)
        == "startup image: none is kept: heads that read the model's keys have no image"
    )


def test_packed_weights_of_a_head_are_kept_by_its_own_files(
    published: AssistantOracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of clusters, too: the second startup drafts with what the first one packed."""
    words = {**SIZES, "packed_cache": str(tmp_path), "startup_image": "off"}
    params, made = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), list[dict[Any, Any]]()
    found = watch(monkeypatch)
    for said in ("written to", "are kept in"):
        found.clear()
        with LLM(str(published.model_folder), speculate=str(published.head_folder), **words) as llm:
            lines = llm.keep_packed(1 << 30).splitlines()
            llm.generate([[3, 4, 5, 6, 7]], params)
        assert len(lines) == 2
        assert all(said in line for line in lines)
        made.append({tuple(ids): draft for ids, draft in found})
    compare_drafts(*made)


def test_all_clusters_of_a_gguf_file_draft_as_a_file_without_them(
    clustered: AssistantOracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has their tensors and not how many are chosen: as many as usual, here all that there are."""
    found, made = watch(monkeypatch), list[dict[Any, Any]]()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for has_centroids in (False, True):
        found.clear()
        head = write_gguf(tmp_path / f"{has_centroids}.gguf", *clustered.as_gguf(has_centroids))
        with LLM(str(clustered.model_folder), speculate=head, **SIZES) as llm:
            llm.generate([[3, 4, 5, 6, 7]], params)
            passes = llm.front.loop.engine.speculation.proposer.passes  # type: ignore[attr-defined]
            assert isinstance(passes, HostPasses)
        made.append({tuple(ids): draft for ids, draft in found})
    compare_drafts(*made)


def compare_drafts(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    """Behind equal tokens drafts are equal, as far as both go."""
    common = one.keys() & other.keys()
    assert common
    assert all(a == b for ids in common for a, b in zip(one[ids], other[ids], strict=False))


def test_a_gpu_tries_what_a_head_binds(published: AssistantOracle) -> None:
    config = EngineConfig(speculate=str(published.head_folder), **SIZES)
    opened = open_model(str(published.model_folder), config)
    draft = open_draft(config, opened.resolved.spec, None)
    spec = find_spec(draft)
    assert isinstance(spec, AssistantSpec)
    tried = list_head_ops(draft, spec, opened).keys()
    assert {"embed", "join", "paged_attention", "linear", "rms_norm"} <= tried
    assert ({"route", "spread_heads", "scatter_logits"} <= tried) == (spec.clusters is not None)
    assert tried < REGISTRY.keys()
