"""A draft model is loaded with the model that it drafts for, or refused before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait import LLM
from plait.config import EngineConfig
from plait.engine.draft_places import place_nbytes
from plait.errors import BadFile, ConfigError, OutOfMemory, UnsupportedModel
from plait.loading import build
from plait.loading.build import Loaded, draft_headers, load
from plait.loading.draft_model import load_draft, open_draft
from plait.loading.make_engine import list_lengths
from plait.request import SamplingParams
from plait.runner.draft import DraftModel, Masks
from plait.schedule.drafts.turns import MOST_DRAFTED, DraftRequest
from plait.schedule.plan import SamplingBatch, SamplingRow
from plait.schedule.speculate import Speculation
from tests.families import tiny

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50)
SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32
}  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(nano_hybrid: Path) -> Iterator[Loaded]:
    made = load(str(nano_hybrid), EngineConfig(speculate=str(nano_hybrid), **SIZES))
    yield made
    made.front.close(drain=False)


def quietly(what: str, done: int, total: int) -> None:
    """Ignores the progress."""


def drafting(model: Loaded, **changes: Any) -> DraftModel:
    config, tokenizer = replace(model.config, **changes), model.opened.tokenizer()
    opened = open_draft(config, model.runner.decoder.spec, tokenizer)
    length = model.sizing.max_model_len
    return load_draft(opened, config, model.target, length, tokenizer, quietly)


def alone(model: Loaded, tokens: list[int], count: int, params: SamplingParams) -> tuple[int, ...]:
    text, runner = list(tokens), model.runner
    for _ in range(count):
        row = SamplingRow(params, 1, 1, len(text), 3)
        text += runner.sampler.sample(runner.logits(text, 64)[-1:], SamplingBatch((row,)))[0].token_ids
    return tuple(text[len(tokens) :])


def changed(model: Path, into: Path, swap: tuple[str, str]) -> Path:
    """The same model with two tokens of its vocabulary exchanged."""
    shutil.copytree(model, into)
    file = into / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab, (a, b) = tokenizer["model"]["vocab"], swap
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(tokenizer))
    return into


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_model_that_drafts_for_itself_is_always_right(hybrid: Loaded, params: SamplingParams) -> None:
    draft, text = drafting(hybrid), [5, 300, 17, 4000, 9]
    for _ in range(3):
        guesses = draft.propose([DraftRequest(1, text, 4, params, 3)])[1]
        assert guesses == alone(hybrid, text, 4, params)
        text += [*guesses, 7]


def test_it_runs_recorded_on_the_threads_of_the_model(hybrid: Loaded) -> None:
    draft = drafting(hybrid)
    assert draft.runner.is_recorded, draft.runner.step_kind
    assert draft.runner.executor is hybrid.target.executor
    assert draft.memory.num_places == SIZES["max_num_seqs"]
    assert draft.memory.max_len == SIZES["max_model_len"]
    assert draft.runner.decoder is not hybrid.runner.decoder


def test_its_memory_is_what_was_computed_before(hybrid: Loaded) -> None:
    draft = drafting(hybrid)
    one = replace(draft.memory, num_places=1)
    states = draft.runner.decoder.states
    each = place_nbytes(one, states, "float32")
    garbage = draft.runner.store.nbytes - 2 * each  # block 0 of each group and slot 0
    assert 0 < garbage < each


def test_places_are_as_many_as_fit(hybrid: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    draft = drafting(hybrid)
    each = place_nbytes(draft.memory, draft.runner.decoder.states, "float32")
    few = drafting(hybrid, memory_limit=4 * each)
    assert few.memory.num_places == 1
    assert "drafts of 1 sequences at a time fit" in caplog.text
    with pytest.raises(OutOfMemory, match=f"--memory-limit of at least {4 * each}, or --speculate ngram"):
        drafting(hybrid, memory_limit=4 * each - 4)


def test_another_number_of_tokens_is_refused(hybrid: Loaded, tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    with pytest.raises(
        ConfigError, match="has 97 tokens and the model 4096: a draft model must have the same"
    ):
        drafting(hybrid, speculate=str(tmp_path))


def test_another_vocabulary_of_the_same_size_is_refused(
    hybrid: Loaded, nano_hybrid: Path, tmp_path: Path
) -> None:
    vocab = json.loads((nano_hybrid / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {i: text for text, i in vocab.items()}
    letters = changed(nano_hybrid, tmp_path / "letters", ("A", "B"))
    with pytest.raises(ConfigError, match="another vocabulary of the same size: a text becomes"):
        drafting(hybrid, speculate=str(letters))
    words = changed(nano_hybrid, tmp_path / "words", (by_id[4000], by_id[4003]))
    with pytest.raises(ConfigError, match=r"token 4000 is '.*' there and '.*' here"):
        drafting(hybrid, speculate=str(words))


def test_models_without_a_tokenizer_are_compared_by_size_alone(hybrid: Loaded) -> None:
    config, spec = hybrid.config, hybrid.runner.decoder.spec
    assert open_draft(config, spec, None).resolved.spec == spec


@pytest.mark.parametrize("name", ["ngramm", "/nowhere/at/all"])
def test_what_is_not_there_says_what_speculate_may_be(hybrid: Loaded, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^speculate: .* \(it is off, ngram, mtp, a head or a draft model\)$"
    ):
        drafting(hybrid, speculate=name)


def test_a_draft_is_not_corrected_by_options_of_its_model(hybrid: Loaded, tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "num_attention_heads": 1 << 20}))
    with pytest.raises(UnsupportedModel, match=r"^speculate: .*; expected a whole number from 0 to 16384$"):
        open_draft(replace(hybrid.config, speculate=str(tmp_path)), hybrid.runner.decoder.spec, None)


def test_a_broken_draft_leaves_the_threads_of_the_model(
    hybrid: Loaded, nano_hybrid: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(nano_hybrid, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadFile):
        drafting(hybrid, speculate=str(folder))
    assert alone(hybrid, [1, 2, 3], 2, GREEDY)


def test_options_about_the_files_of_the_model_are_not_for_the_draft(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    set_options = ("max_position_embeddings=64",)
    made = load(str(tmp_path), EngineConfig(speculate=str(tmp_path), set=set_options, **SIZES))
    try:
        draft = drafting(made)
        assert draft.runner.decoder.spec.max_len == 128
        assert made.runner.decoder.spec.max_len == 64
        assert draft.memory.max_len == 64
    finally:
        made.front.close(drain=False)


@pytest.mark.parametrize("word", ["ngram", "/nowhere"])
def test_a_model_that_computes_whole_sequences_takes_no_drafts(hybrid: Loaded, word: str) -> None:
    resolved = replace(hybrid.opened.resolved, spec=replace(hybrid.front.spec, causal=False))
    config, opened = hybrid.config, replace(hybrid.opened, resolved=resolved)
    text = f"^speculate: {word} is set, but this model computes a whole"
    with pytest.raises(ConfigError, match=text):
        draft_headers(replace(opened, config=replace(config, speculate=word)), None)
    assert draft_headers(replace(opened, config=replace(config, speculate="off")), None) is None


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama which says that it drafts all tokens in one pass."""
    folder = tmp_path_factory.mktemp("pard")
    tiny.write("llama", folder)
    change_config(folder, pard_token=7)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_of_pard_drafts_in_one_pass(masked: Path) -> None:
    """The text is that of the model alone, though its drafts are not its own words."""
    sizes = SIZES | {"max_model_len": 128}
    found, params = [], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for words in ({}, {"speculate": str(masked), "num_draft_tokens": 40}):
        with LLM(str(masked), **sizes, **words) as llm:
            found.append([llm.generate([[3, 4, 5], [8, 9]], params)[i].outputs[0].token_ids for i in (0, 1)])
    assert found[0] == found[1]
    assert isinstance(drafts := llm.front.loop.engine.speculation, Speculation)
    assert isinstance(drafts.proposer, DraftModel)
    assert drafts.proposer.masks == Masks(7, MOST_DRAFTED)
    assert drafts.num_drafted > 0
    assert drafts.error is None
    assert drafts.is_even, "its length costs next to nothing, so it is tried"
    assert drafts.governor is not None
    assert drafts.governor.choose(1) in list_lengths(drafts.proposer, 40) == [3, 4, 6, 8, 12, 16]


def test_a_mask_that_is_no_token_is_refused(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(masked, folder := tmp_path / "other")
    change_config(folder, pard_token=97)
    monkeypatch.setattr(build, "load_decoder", lambda *_: pytest.fail("weights take minutes"))
    with pytest.raises(ConfigError, match="speculate: pard_token is '97', not a token from 0 to 96"):
        load(str(masked), EngineConfig(speculate=str(folder), **SIZES))
