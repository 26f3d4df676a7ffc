"""Heads of DFlash in every published layout, against the reference: states, drafts, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import ConfigError, PlaitError, ShapeMismatch, UnsupportedModel
from plait.families.dflash import is_dflash_gguf, resolve_dflash, resolve_dflash_gguf
from plait.families.dflash_names import find_prefix
from plait.families.eagle import find_first_layer
from plait.families.resolve import resolve
from plait.memory import BlockGroup, block_groups
from plait.model.dflash import DFlashHead
from plait.model.eagle import ObservedDecoder, StateReader, row_size, take_observed
from plait.model.layers.layers import Batch
from plait.model.token_conv import BlockRows
from plait.runner.host.block_passes import BlockForm, plan_blocks
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.attention import BlockAttentionSpec
from plait.spec.draft_heads import DFlashSpec
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.dflash_oracle import LAYOUTS, MASK, OWN, DFlashOracle
from tests.families.eagle_oracle import VOCAB
from tests.families.parity import CPU, LONGEST, Memory, worst
from tests.families.test_eagle import VALUES, some_ids

TOLERANCE = 1e-4
Made = tuple[DFlashOracle, ObservedDecoder, DFlashHead]


def describe(oracle: DFlashOracle, **changes: object) -> tuple[DFlashSpec, Weights]:
    """The head's spec, and its tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in oracle.tensors.items()}
    assert find_prefix(shapes) == oracle.layout.prefix
    assert find_first_layer(shapes) is None
    found = resolve_dflash({**oracle.config, **changes}, shapes)
    assert isinstance(found.spec, DFlashSpec)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    return found.spec, Weights(Memory(oracle.tensors), found.names, target)


def describe_gguf(oracle: DFlashOracle) -> tuple[DFlashSpec, Weights]:
    """The same, of the head as a GGUF file."""
    metadata, tensors = oracle.as_gguf()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert is_dflash_gguf(metadata)
    found = resolve_dflash_gguf(metadata, shapes, tensors.__getitem__)
    assert isinstance(found.spec, DFlashSpec)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    return found.spec, Weights(Memory(tensors), found.names, target)


def build(oracle: DFlashOracle, spec: DFlashSpec, weights: Weights) -> tuple[ObservedDecoder, DFlashHead]:
    config, tensors, _ = tiny.read(oracle.trunk_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = resolve(config, shapes, read=tensors.__getitem__)
    target = Target(CPU, torch.float32, LONGEST, model.spec.hidden_size)
    lent = Weights(Memory(tensors), model.names, target)
    trunk = ObservedDecoder(model.spec, lent)
    lent.check_all_used()
    trunk.reader = StateReader(spec, weights, model.spec)
    trunk.layers = trunk.reader.layers
    head = DFlashHead(spec, weights, trunk, model.spec, lent)
    weights.check_all_used()
    return trunk, head


def build_head(oracle: DFlashOracle, **changes: object) -> DFlashHead:
    return build(oracle, *describe(oracle, **changes))[1]


@pytest.fixture(scope="module", params=[*LAYOUTS, *(f"{name} as GGUF" for name in LAYOUTS)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, _, file = request.param.partition(" as ")
    oracle = DFlashOracle(name, tmp_path_factory.mktemp(name))
    return oracle, *build(oracle, *(describe_gguf(oracle) if file else describe(oracle)))


class Session:
    """Memory of one sequence. Entries that nothing wrote are NaN."""

    def __init__(self, run: ObservedDecoder | DFlashHead, groups: tuple[BlockGroup, ...]) -> None:
        self.groups = groups
        self.store = StateStore(run.states, {g.name: 9 for g in groups}, 0, 4, CPU, torch.float32)
        for tensor in self.store.tensors:
            tensor.fill_(float("nan"))

    def plan(self, start: int, ids: Tensor) -> StepPlan:
        table = tuple(range(8, 0, -1))
        return StepPlan(0, (Chunk(0, start, tuple(ids.tolist()), (table,) * len(self.groups), 0, len(ids)),))

    def batch(self, plan: StepPlan) -> Batch:
        return build_batch(plan, self.groups, 4, CPU)


@torch.inference_mode()
def test_model_shows_what_the_head_reads(made: Made) -> None:
    oracle, trunk, head = made
    ids = some_ids(13, 2)
    wanted = oracle.observe(ids)
    assert wanted.shape[1] == row_size(trunk) == head.width
    session = Session(trunk, block_groups(trunk.states))
    batch = session.batch(session.plan(0, ids))
    assert worst(take_observed(trunk, trunk.hidden(batch, session.store)), wanted) <= TOLERANCE


@torch.inference_mode()
def test_head_drafts_as_the_reference_does(made: Made) -> None:
    """What is known comes in chunks, with blocks between them, of which no trace may be left."""
    oracle, _, head = made
    ids, session = some_ids(15, 3), Session(head, head.groups)
    g = oracle.observe(ids)
    form = BlockForm(head.spec.most, head.spec.mask_token, head.spec.from_last)
    for start, end, length in ((0, 6, 3), (6, 7, 7), (7, 13, 1), (13, 14, 5)):
        plan = session.plan(start, ids[start + 1 : end + 1])
        head.keep(session.batch(plan), session.store, g[start:end])
        batch = session.batch(plan_blocks(plan, length, form))
        rows = BlockRows.of(torch.tensor([0, form.count_rows(length)]))
        last = head.compute(batch, session.store, rows)
        found, previous = head.logits(last), int(ids[end])
        wanted, states = oracle.draft_block(g[:end], previous, length)
        compare(found, wanted)
        for i in range(length if head.choice else 0):
            assert head.choice is not None
            made = head.choice.adjust(found[i : i + 1], last[i : i + 1], torch.tensor([previous]))
            expected = oracle.adjust(wanted[i], states[i], previous)
            compare(made[0], expected)
            previous = int(expected.argmax())


def compare(found: Tensor, wanted: Tensor) -> None:
    there = wanted.isfinite()
    assert torch.equal(found.isfinite(), there)
    assert worst(found[there], wanted[there]) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "its layers are of type 'gpt_oss'"),
        ({"num_attention_heads": 3}, "cannot share 2 key-value heads"),
        ({"block_size": 1}, "block_size is '1', not a number from 2 to 1024"),
        ({"dflash_config": {**OWN, "mask_token_id": 97}}, "mask_token_id is '97', not a number from 0 to 96"),
        ({"dflash_config": {"mask_token_id": 9}}, "no target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1.5]}}, "'1.5' is no number of a layer"),
        (
            {"mask_token_id": None, "dflash_config": {"target_layer_ids": [1]}},
            "the file has no mask_token_id",
        ),
        ({"num_experts": 4}, "its layers have experts"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated', which is not implemented"),
        ({"shift_label": True}, "shift_label is true"),
        ({"attention_value_scale": 0.5}, "attention_value_scale is not 1"),
        ({"use_swa": True}, "the file has no swa_window_size, which such a head needs"),
        ({"is_causal": "no"}, "is_causal is 'no', not true or false"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        describe(DFlashOracle("z-lab", tmp_path), **changes)


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.parametrize("name", ["scales", "speculators", "DSpark", "DFlash2"])
def test_no_value_of_a_config_raises_another_error(name: str, tmp_path: Path) -> None:
    oracle = DFlashOracle(name, tmp_path)
    for part in ("transformer_layer_config", "dflash_config", ""):
        inner = (
            oracle.config.get(part, {}) if part else {**oracle.config, "layer_types": None, "use_swa": None}
        )
        for key in inner:
            for value in VALUES:
                changes = {part: {**inner, key: value}} if part else {key: value}
                with contextlib.suppress(PlaitError):
                    build_head(oracle, **changes)


@pytest.mark.parametrize("name", ["scales", "DSpark in parts", "DFlash2"])
def test_no_value_of_a_gguf_file_raises_another_error(name: str, tmp_path: Path) -> None:
    metadata, tensors = DFlashOracle(name, tmp_path).as_gguf()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for key in (*metadata, "dflash.rope.scaling.type", "tokenizer.ggml.tokens"):
        for value in VALUES:
            with contextlib.suppress(PlaitError):
                resolve_dflash_gguf({**metadata, key: value}, shapes, tensors.__getitem__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 48}, "reads states of 48 numbers, and this model's have 32"),
        ({"vocab_size": 96}, "for a vocabulary of 96 tokens, and this model has 97"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 7]}},
            "reads states before layer 8, of 7 layers",
        ),
    ],
)
def test_head_of_another_model_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_head(DFlashOracle("z-lab", tmp_path), **changes)


@pytest.mark.parametrize("name", ["DSpark", "z-lab"])
def test_what_is_null_is_as_if_it_were_not_there(name: str, tmp_path: Path) -> None:
    oracle = DFlashOracle(name, tmp_path)
    keys = ("aux_hidden_state_layer_ids", "projector_type", "sample_from_anchor", "is_causal", "use_swa")
    nothing = dict.fromkeys((*keys, "markov_head_type", "sliding_window_non_causal"))
    assert describe(oracle, **nothing)[0] == describe(oracle)[0]


def test_a_table_of_no_dimension_is_refused(tmp_path: Path) -> None:
    oracle = DFlashOracle("DSpark", tmp_path)
    oracle.tensors["markov_head.markov_w1.weight"] = torch.tensor(1.0)
    with pytest.raises(UnsupportedModel, match=r"config\.json has values that cannot be"):
        describe(oracle)


def test_a_table_of_all_tokens_is_no_head_of_a_few(tmp_path: Path) -> None:
    oracle = DFlashOracle("speculators", tmp_path)
    del oracle.tensors["lm_head.weight"]
    oracle.tensors["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    inner = {**oracle.config["transformer_layer_config"], "tie_word_embeddings": True}
    with pytest.raises(ShapeMismatch, match="embedding of 97 tokens cannot be its lm_head of 41"):
        build_head(oracle, transformer_layer_config=inner)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("dflash.attention.head_count", r"has no dflash\.attention\.head_count, which such a head needs"),
        ("dflash.vocab_size", r"neither dflash\.vocab_size nor tokenizer\.ggml\.tokens"),
        ("dflash.target_layers", r"\(dflash\.target_layers in GGUF\)"),
        ("tokenizer.ggml.mask_token_id", "the file has no mask_token_id"),
    ],
)
def test_a_key_that_a_gguf_file_lacks_is_named(key: str, message: str, tmp_path: Path) -> None:
    metadata, tensors = DFlashOracle("z-lab", tmp_path).as_gguf()
    del metadata[key]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(UnsupportedModel, match=message):
        resolve_dflash_gguf(metadata, shapes, tensors.__getitem__)


def test_every_layer_may_have_a_window(tmp_path: Path) -> None:
    """MiMo's heads: all rows of a block see each other, and a window of the text."""
    oracle = DFlashOracle("z-lab", tmp_path)
    for changes in ({"sliding_window": 9}, {"dflash_config": {**OWN, "swa_window_size": 9}}):
        spec, _ = describe(oracle, use_swa=True, **changes)
        mixers = [*spec.mixers_of(BlockAttentionSpec)]
        assert [(m.window, m.sees_ahead) for m in mixers] == [(9, True)] * 2


def test_a_mask_may_be_the_first_token(tmp_path: Path) -> None:
    oracle = DFlashOracle("z-lab", tmp_path)
    spec, _ = describe(oracle, dflash_config={**OWN, "mask_token_id": 0})
    assert spec.mask_token == 0


def test_tokens_that_a_vocabulary_has_not_are_refused(tmp_path: Path) -> None:
    oracle = DFlashOracle("speculators", tmp_path)
    oracle.tensors["d2t"] += VOCAB
    with pytest.raises(ShapeMismatch, match=f"d2t does not name 41 different tokens of {VOCAB}"):
        build_head(oracle)
