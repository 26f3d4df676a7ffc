"""Gemma 4's assistants against transformers: drafts over a model's own memory, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import ConfigError, MissingTensor, PlaitError, ShapeMismatch, UnsupportedModel
from plait.families.gemma4_assistant import (
    CENTROIDS,
    is_assistant,
    is_assistant_gguf,
    resolve_assistant,
    resolve_assistant_gguf,
)
from plait.families.resolve import resolve
from plait.memory import block_groups
from plait.model.assistant import AssistantHead, bind_layers
from plait.model.decoder import Decoder
from plait.model.layers.layers import LmHead
from plait.runner.host.mtp_passes import go_on
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.draft_heads import AssistantSpec
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.assistant_oracle import ARCH, PAIRS, AssistantOracle
from tests.families.parity import CPU, LONGEST, Memory, worst

TOLERANCE = 1e-4
WHOLE_GGUF = "GGUF with centroids"
Made = tuple[AssistantOracle, Decoder, AssistantHead]


def build(
    oracle: AssistantOracle,
    *,
    lends: bool = True,
    file: str = "",
    others: Mapping[str, Tensor | None] | None = None,
    **changes: Any,
) -> tuple[Decoder, AssistantHead]:
    """The model, and its head with these values in its config; of its text, where that has such a key.

    others: tensors that the head has in place of its own; None: it has none of that name.
    """
    if file:
        metadata, stored = oracle.as_gguf(file == WHOLE_GGUF)
        assert is_assistant_gguf(metadata)
        named = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        found = resolve_assistant_gguf({**metadata, **changes}, named, stored.__getitem__)
    else:
        config, stored = oracle.described, tiny.load_file(oracle.head_folder / "model.safetensors")
        for key, value in changes.items():
            (config["text_config"] if key in config["text_config"] else config)[key] = value
        assert is_assistant(config)
        found = resolve_assistant(config)
    assert isinstance(found.spec, AssistantSpec)
    described, tensors, _ = tiny.read(oracle.model_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = resolve(described, shapes, read=tensors.__getitem__)
    lent = Weights(Memory(tensors), model.names, Target(CPU, torch.float32, LONGEST, model.spec.hidden_size))
    trunk = Decoder(model.spec, lent)
    stored = {name: tensor for name, tensor in {**stored, **(others or {})}.items() if tensor is not None}
    own = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    weights = Weights(Memory(stored), found.names, own)
    head = AssistantHead(found.spec, weights, trunk if lends else None, model.spec, lent)
    weights.check_all_used()
    return trunk, head


IN_GGUF = [f"{name} in GGUF" for name in PAIRS if name != "clusters of an own head"]


@pytest.fixture(scope="module", params=[*PAIRS, *IN_GGUF, f"clusters in {WHOLE_GGUF}"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, _, file = request.param.partition(" in ")
    oracle = AssistantOracle(name, tmp_path_factory.mktemp("pair"))
    return oracle, *build(oracle, file=file)


@torch.inference_mode()
def draft(
    trunk: Decoder, head: AssistantHead, ids: Tensor, tokens: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """(logits, the state to go on from) of draft tokens behind `ids`, of which the model computes all but
    the last, in two steps. `tokens`: the draft."""
    groups = block_groups(trunk.states)
    store = StateStore(trunk.states, {group.name: 16 for group in groups}, 0, 4, CPU, torch.float32)
    tables = (tuple(range(8, 0, -1)),) * len(groups)
    end, found = len(ids) - 1, []
    for start, stop in ((0, end - 3), (end - 3, end)):
        chunk = Chunk(0, start, tuple(ids[start:stop].tolist()), tables, 0, 1)
        hidden = trunk.hidden(build_batch(StepPlan(0, (chunk,)), groups, 4, CPU), store)
    before = hidden[-1:].clone()
    plan = StepPlan(0, (Chunk(0, end - 1, (int(ids[-1]),), tables, 0, 1),))
    for token in tokens:
        batch = build_batch(plan, head.groups, 4, CPU)
        logits = head.logits(head.keep_last(head.compute(batch, store, before), batch, before))
        found.append((logits[0], before[0].clone()))
        plan = go_on(plan, [token], stays=head.stays)
    return found


@pytest.mark.parametrize("length", [5, 17])
def test_head_drafts_as_transformers_does(made: Made, length: int) -> None:
    """A text that the window holds, and one of which it holds a part.

    With centroids transformers leaves out most tokens: their logits are 1 below the least of the others, and
    here -inf. A GGUF file does not say how many clusters are chosen.
    """
    oracle, trunk, head = made
    ids = torch.randint(1, oracle.vocab, (length,), generator=torch.Generator().manual_seed(length))
    logits, states, tokens = oracle.draft(ids, 5)
    chosen = oracle.config.centroid_intermediate_top_k if oracle.config.use_ordered_embeddings else None
    for i, (found, state) in enumerate(draft(trunk, head, ids, tokens)):
        there = logits[i] > logits[i].min() + 0.5 if chosen else logits[i] < 9
        assert there.sum() >= 32
        assert worst(found[there], logits[i][there]) <= TOLERANCE
        assert worst(state, states[i]) <= TOLERANCE
        if head.spec.clusters and head.spec.clusters.chosen == chosen:
            assert there.sum() < len(there)
            assert torch.equal(found.isneginf(), ~there)
        else:
            assert found.isfinite().all()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle("keys as values", tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers is 0"),
        ({"model_type": "gemma3_text"}, "model_type = 'gemma3_text' is not implemented for an assistant"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2, and all 3 layers of an assistant"),
        ({"enable_moe_block": True}, "enable_moe_block = True is not implemented for an assistant"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True is not implemented"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8 is not implemented"),
        ({"backbone_hidden_size": "many"}, "model_size is 'many', not a number"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    first: AssistantOracle, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build(first, **changes)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle("clusters", tmp_path_factory.mktemp("clustered"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_centroids": 7},
            "num_centroids is 7 and centroid_intermediate_top_k is 5: 96 tokens are divided",
        ),
        ({"num_centroids": 0}, "num_centroids is 0 and"),
        ({"num_centroids": None}, "num_centroids is 2048 and"),
        ({"num_centroids": "many"}, "num_centroids is 'many' and"),
        ({"num_centroids": True}, "num_centroids is True and"),
        ({"centroid_intermediate_top_k": 13}, "centroid_intermediate_top_k is 13: 96 tokens"),
        ({"centroid_intermediate_top_k": 0}, "centroid_intermediate_top_k is 0: 96 tokens"),
        ({"use_ordered_embeddings": "yes"}, "use_ordered_embeddings = 'yes' is not implemented"),
    ],
)
def test_clusters_that_cannot_be_are_refused(
    clustered: AssistantOracle, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build(clustered, **changes)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.arange(96).clamp(max=94), "do not have each of 96 tokens once"),
        (torch.arange(96) + 1, "do not have each of 96 tokens once"),
        (torch.arange(96) - 96, "do not have each of 96 tokens once"),
        (torch.arange(95), r"has shape \[95\], the model wants \[96\]"),
    ],
)
def test_order_that_leaves_tokens_out_is_refused(
    clustered: AssistantOracle, order: Tensor, message: str
) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        build(clustered, others={CENTROIDS[1]: order})


def test_tensors_of_clusters_may_be_there_unused(clustered: AssistantOracle) -> None:
    _, head = build(clustered, use_ordered_embeddings=False)
    assert isinstance(head.head, LmHead)
    with pytest.raises(MissingTensor, match=f"clusters.tokens wants '{CENTROIDS[1]}'"):
        build(clustered, others={CENTROIDS[1]: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 48}, "reads states of 48 numbers, and this model's have 32"),
        ({"vocab_size": 96}, "for a vocabulary of 96 tokens, and this model has 97"),
        ({"head_dim": 16}, "with a window are of 2 heads of 8 numbers in a window of 6: it was trained"),
        ({"sliding_window": 7}, "reads keys of 2 heads of 8 numbers in a window of 7, and those of this"),
        ({"num_key_value_heads": 1}, "reads keys of 1 heads of 8 numbers in a window of 6, and those"),
        ({"per_layer_config": {"2": {"head_dim": 8}}}, "layer without windows are of 1 heads of 16 numbers"),
    ],
)
def test_head_of_another_model_is_refused(
    first: AssistantOracle, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(first, **changes)


def test_model_without_such_layers_is_refused(first: AssistantOracle) -> None:
    config = resolve_assistant(first.described)
    assert isinstance(config.spec, AssistantSpec)
    described, tensors, _ = tiny.read(first.model_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    whole = {**described, "layer_types": ["full_attention"] * described["num_hidden_layers"]}
    model = resolve(whole, shapes, read=tensors.__getitem__)
    with pytest.raises(ConfigError, match="keys of a layer with a window, and this model has none"):
        bind_layers(config.spec, model.spec)


VALUES = (None, -1, 0, 3, 10**9, 0.5, 1e30, float("nan"), True, "x", [], [1], ["x"], {}, {"rope_type": "x"})


@pytest.mark.sampled(2, across="heavy")
def test_no_value_of_a_config_raises_another_error(first: AssistantOracle) -> None:
    config = first.described
    for key in (*config, *config["text_config"], "rope_scaling", "layer_types"):
        for value in VALUES:
            with contextlib.suppress(PlaitError):
                build(first, **{key: value})


def test_no_value_of_a_gguf_file_raises_another_error(first: AssistantOracle) -> None:
    metadata, tensors = first.as_gguf()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for key in (*metadata, f"{ARCH}.rope.scaling.type", f"{ARCH}.expert_count"):
        for value in VALUES:
            with contextlib.suppress(PlaitError):
                resolve_assistant_gguf({**metadata, key: value}, shapes, tensors.__getitem__)
    del metadata[f"{ARCH}.embedding_length_out"]
    with pytest.raises(UnsupportedModel, match=r"no gemma4-assistant\.embedding_length_out, the size of"):
        resolve_assistant_gguf(metadata, shapes, tensors.__getitem__)


def test_lent_embedding_is_the_models_own(first: AssistantOracle) -> None:
    """Where no model is loaded, it is read again."""
    (trunk, lent), (_, alone) = build(first), build(first, lends=False)
    assert lent.embed is trunk.embed
    ids = torch.arange(9)
    assert torch.equal(alone.embed(ids, ids), trunk.embed(ids, ids))
