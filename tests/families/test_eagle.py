"""Heads of EAGLE-3 in every published layout, against the reference: states, drafts, and what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import ConfigError, MissingTensor, PlaitError, ShapeMismatch, UnsupportedModel
from plait.families.eagle import find_first_layer, is_eagle_gguf, resolve_eagle, resolve_eagle_gguf
from plait.families.resolve import resolve
from plait.memory import block_groups
from plait.model.eagle import (
    EagleHead,
    ObservedDecoder,
    StateReader,
    check_model,
    row_size,
    take_observed,
)
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.draft_heads import EagleSpec
from plait.spec.model import ModelSpec, NormSpec
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.eagle_oracle import LAYOUTS, VOCAB, EagleOracle
from tests.families.parity import CPU, LONGEST, Memory, worst

TOLERANCE = 1e-4
Made = tuple[EagleOracle, ObservedDecoder, EagleHead]


def describe(oracle: EagleOracle, **changes: object) -> tuple[EagleSpec, Weights]:
    """The head's spec, and its tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in oracle.tensors.items()}
    assert find_first_layer(shapes) == (oracle.layout.prefix, oracle.layout.first)
    found = resolve_eagle({**oracle.config, **changes}, shapes)
    assert isinstance(found.spec, EagleSpec)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    return found.spec, Weights(Memory(oracle.tensors), found.names, target)


def describe_gguf(oracle: EagleOracle) -> tuple[EagleSpec, Weights]:
    """The same, of the head as a GGUF file."""
    metadata, tensors = oracle.as_gguf()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert is_eagle_gguf(metadata)
    found = resolve_eagle_gguf(metadata, shapes, tensors.__getitem__)
    assert isinstance(found.spec, EagleSpec)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    return found.spec, Weights(Memory(tensors), found.names, target)


@pytest.fixture(scope="module", params=[*LAYOUTS, "first in GGUF", "modelopt in GGUF"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, _, file = request.param.partition(" in ")
    oracle = EagleOracle(name, tmp_path_factory.mktemp(name))
    spec, weights = describe_gguf(oracle) if file else describe(oracle)
    config, tensors, _ = tiny.read(oracle.trunk_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = resolve(config, shapes, read=tensors.__getitem__)
    target = Target(CPU, torch.float32, LONGEST, model.spec.hidden_size)
    lent = Weights(Memory(tensors), model.names, target)
    trunk = ObservedDecoder(model.spec, lent)
    lent.check_all_used()
    if oracle.layout.taps:
        trunk.reader = StateReader(spec, weights, model.spec)
        trunk.layers = trunk.reader.layers
    head = EagleHead(spec, weights, trunk, model.spec, lent)
    weights.check_all_used()
    return oracle, trunk, head


class Session:
    """One sequence of a model or a head, in memory of its own."""

    def __init__(self, run: ObservedDecoder | EagleHead) -> None:
        self.run, self.groups = run, block_groups(run.states)
        self.last = torch.empty(0)
        self.store = StateStore(run.states, {g.name: 9 for g in self.groups}, 0, 4, CPU, torch.float32)
        for tensor in self.store.tensors:
            tensor.fill_(float("nan"))

    @torch.inference_mode()
    def observe(self, start: int, ids: Tensor) -> Tensor:
        """What a model shows of each row."""
        assert isinstance(self.run, ObservedDecoder)
        batch = self._batch(start, ids)
        hidden = self.run.hidden(batch, self.store)
        self.last = self.run.logits(hidden, batch)
        return take_observed(self.run, hidden)

    @torch.inference_mode()
    def draft(self, start: int, ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """(what a head makes of every row, logits of every row)."""
        assert isinstance(self.run, EagleHead)
        batch, before = self._batch(start, ids), before.clone()
        hidden = self.run.compute(batch, self.store, before)
        return hidden, self.run.logits(self.run.keep_last(hidden, batch, before))

    def _batch(self, start: int, ids: Tensor) -> object:
        table = tuple(range(8, 0, -1))
        chunk = Chunk(0, start, tuple(ids.tolist()), (table,) * len(self.groups), 0, len(ids))
        return build_batch(StepPlan(0, (chunk,)), self.groups, 4, CPU)


def some_ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def test_model_shows_what_the_head_reads(made: Made) -> None:
    oracle, trunk, _ = made
    ids, session = some_ids(13, 2), Session(trunk)
    wanted = oracle.observe(ids)
    assert wanted.shape[1] == row_size(trunk)
    for start, end in ((0, 6), (6, 7), (7, 13)):
        assert worst(session.observe(start, ids[start:end]), wanted[start:end]) <= TOLERANCE
        assert worst(session.last, oracle.logits(ids)[start:end]) <= TOLERANCE


def test_head_drafts_as_the_reference_does(made: Made) -> None:
    """Chunks, then drafts one by one, each from what the head made itself."""
    oracle, _, head = made
    ids = some_ids(14, 3)
    g, known, session = oracle.observe(ids)[:-1], ids[1:], Session(head)
    for start, end in ((0, 6), (6, 7), (7, 13)):
        states, logits = session.draft(start, known[start:end], g[start:end])
    for at in range(13, 17):
        wanted, expected = oracle.outputs(known, g)
        assert worst(states[-1], wanted[-1]) <= TOLERANCE
        there = expected[-1].isfinite()
        assert torch.equal(logits[-1].isfinite(), there)
        assert worst(logits[-1][there], expected[-1][there]) <= TOLERANCE
        token = expected[-1:].argmax(-1)
        known, g = torch.cat([known, token]), torch.cat([g, wanted[-1:]])
        states, logits = session.draft(at, token, states[-1:])


def test_a_mask_stands_for_what_the_model_made(made: Made) -> None:
    oracle, trunk, head = made
    head.make_mask(trunk.reader)
    assert (head.mask is None) == (oracle.mask_token is None)
    if head.mask is None:
        return
    ids, session = some_ids(9, 5), Session(head)
    g, masks = oracle.observe(ids)[:-1], torch.full((3,), head.spec.mask_token or 0)
    rows = torch.cat([g, head.mask.expand(3, -1)])
    _, logits = session.draft(0, torch.cat([ids[1:], masks]), rows)
    assert torch.equal(logits[-4:].argmax(-1), oracle.draft(ids[1:], g, 4))


def test_a_layer_that_is_read_twice_has_two_masks(tmp_path: Path) -> None:
    oracle = EagleOracle("parallel", tmp_path)
    spec, weights = describe(oracle, eagle_aux_hidden_state_layer_ids=[2, 4, 2])
    config, tensors, _ = tiny.read(oracle.trunk_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = resolve(config, shapes, read=tensors.__getitem__)
    reader = StateReader(spec, weights, model.spec)
    head = EagleHead(spec, weights, None, model.spec, Weights(Memory(tensors), model.names, weights.target))
    head.make_mask(reader)
    parts = oracle.masked[0].chunk(3, -1)
    assert head.mask is not None
    assert worst(head.mask, oracle._read(parts)) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id is '97', not a number from 0 to 96"),
        (
            {"mask_token_id": None},
            "in one pass, and the file has none of mask_token_id, ptd_token_id",
        ),
        ({"mask_token_id": None, "ptd_token_id": 1.0}, "ptd_token_id is '1.0', not a number"),
    ],
)
def test_a_head_with_masks_says_which_token_they_have(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        describe(EagleOracle("parallel", tmp_path), **changes)


def test_masks_of_other_sizes_are_refused(tmp_path: Path) -> None:
    oracle = EagleOracle("parallel", tmp_path)
    oracle.tensors["mask_hidden"] = torch.ones(1, 1, 64)
    with pytest.raises(ShapeMismatch, match="mask_hidden has 64 numbers, and the head reads 96"):
        build_head(oracle)
    del oracle.tensors["mask_hidden"]
    with pytest.raises(MissingTensor, match="mask_hidden"):
        build_head(oracle)
    assert describe(oracle, speculators_model_type="eagle3")[0].mask_token is None, "a token of its model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "its layers are of type 'gpt_oss'"),
        ({"num_attention_heads": 3}, "cannot share 2 key-value heads"),
        ({"draft_vocab_size": "many"}, "num_drafted is 'many', not a number"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "config.json has values that cannot be"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2.5, 4]}, "'2.5', which is no number of a layer"),
        ({"eagle_aux_hidden_state_layer_ids": [True, 2, 4]}, "'True', which is no number of a layer"),
        ({"norm_output": "false"}, "norm_output is 'false', not true or false"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        describe(EagleOracle("first", tmp_path), **changes)


VALUES = (None, -1, 0, 3, 10**9, 0.5, 1e30, float("nan"), True, "x", [], [1], ["x"], {}, {"rope_type": "x"})


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.parametrize("name", ["modelopt", "speculators", "parallel"])
def test_no_value_of_a_config_raises_another_error(name: str, tmp_path: Path) -> None:
    oracle = EagleOracle(name, tmp_path)
    inner = oracle.config.get("transformer_layer_config", {})
    for key in (*oracle.config, *inner, "layer_types", "rope_scaling", "sliding_window", "eagle_config"):
        for value in VALUES:
            changes = {"transformer_layer_config": {**inner, key: value}} if key in inner else {key: value}
            with contextlib.suppress(PlaitError):
                build_head(oracle, **changes)


def test_no_value_of_a_gguf_file_raises_another_error(tmp_path: Path) -> None:
    metadata, tensors = EagleOracle("modelopt", tmp_path).as_gguf()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for key in (*metadata, "eagle3.rope.scaling.type", "tokenizer.ggml.tokens"):
        for value in VALUES:
            with contextlib.suppress(PlaitError):
                resolve_eagle_gguf({**metadata, key: value}, shapes, tensors.__getitem__)


def build_head(oracle: EagleOracle, **changes: object) -> EagleHead:
    spec, weights = describe(oracle, **changes)
    config, tensors, _ = tiny.read(oracle.trunk_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = resolve(config, shapes, read=tensors.__getitem__)
    target = Target(CPU, torch.float32, LONGEST, model.spec.hidden_size)
    lent = Weights(Memory(tensors), model.names, target)
    if spec.list_taps(7):
        StateReader(spec, weights, model.spec)
    return EagleHead(spec, weights, None, model.spec, lent)


def test_a_head_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    oracle = EagleOracle("wide", tmp_path)
    del oracle.tensors["fc.weight"]
    with pytest.raises(MissingTensor, match=r"fc\.weight"):
        build_head(oracle)
    spec, _ = describe(oracle, eagle_config={"use_aux_hidden_state": False}, norm_before_fc=False)
    model = ModelSpec("llama", 32, VOCAB, ((),) * 7, NormSpec(), 64)
    with pytest.raises(ConfigError, match="goes on from states of 48 numbers, and the model's have 32"):
        check_model(spec, model)
    with pytest.raises(ConfigError, match="reads no models with learned positions"):
        check_model(replace(spec, hidden_size=32), replace(model, positions=9))


def test_a_tied_head_reads_its_own_table(tmp_path: Path) -> None:
    oracle = EagleOracle("modelopt", tmp_path)
    del oracle.tensors["lm_head.weight"]
    head = build_head(oracle, tie_word_embeddings=True)
    last = torch.randn(2, 32)
    normed = head.norm(last)
    assert worst(head.logits(last), normed @ oracle.tensors["embed_tokens.weight"].T) <= TOLERANCE


def test_tokens_that_a_vocabulary_has_not_are_refused(tmp_path: Path) -> None:
    oracle = EagleOracle("first", tmp_path)
    kept = oracle.tensors["d2t"].clone()
    for wrong in (kept + VOCAB, kept - VOCAB, torch.zeros_like(kept).index_fill_(0, torch.tensor([1]), -1)):
        oracle.tensors["d2t"] = wrong
        with pytest.raises(ShapeMismatch, match=f"d2t does not name 41 different tokens of {VOCAB}"):
            build_head(oracle)
    del oracle.tensors["d2t"]
    with pytest.raises(ShapeMismatch, match="logits of 41 tokens and no d2t"):
        build_head(oracle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 48}, "reads states of 48 numbers, and this model's have 32"),
        ({"vocab_size": 96}, "for a vocabulary of 96 tokens, and this model has 97"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "reads states before layer 8, of 7 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -2, 3]}, "reads states before layer -2, of 7 layers"),
    ],
)
def test_head_of_another_model_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_head(EagleOracle("first", tmp_path), **changes)
