"""Passes over canvases as captured steps: the text of steps op by op, at the passes that these need."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.model.decoder import Decoder
from plait.runner.sampling.sampler import Sampler
from tests.families import canvases
from tests.families.canvases import Oracle
from tests.runner.device_engine import Side, opaque_decoder

PROMPTS = ((3, 4, 5), (1, 2, 3, 4, 5, 6, 7, 8), tuple(range(2, 23)))
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_k": 20},
    {"presence_penalty": 0.6, "min_tokens": 3},
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return opaque_decoder("sdar", tmp_path_factory.mktemp("sdar"))


def run(decoder: Decoder, *, has_graphs: bool, **more: Any) -> tuple[dict[str, list[int]], Side]:
    side = Side(decoder, has_graphs, chip=None, blocks=24, budget=32)
    for turn, way in enumerate(WAYS):
        for i, prompt in enumerate(PROMPTS):
            side.submit(f"{turn}r{i}", prompt, max_tokens=11, **way, **more)
    return side.finish(), side


def test_captured_passes_give_the_text_of_passes_op_by_op(decoder: Decoder) -> None:
    plain, _ = run(decoder, has_graphs=False)
    found, side = run(decoder, has_graphs=True)
    assert found == plain
    checks = side.replay.checks
    assert checks is not None
    assert checks.graphs
    assert not checks.refused
    assert max(key.size.tokens for key in checks.graphs) > 16  # canvases of several sequences


def test_requested_log_probabilities_change_no_text(decoder: Decoder) -> None:
    plain, _ = run(decoder, has_graphs=True)
    found, side = run(decoder, has_graphs=True, logprobs=1)
    assert found == plain
    scores = [s for event in side.reader.events["0r1", 0] for s in event.logprobs or ()]
    assert [s.token_id for s in scores] == found["0r1"]
    assert all(len(s.top) in (1, 2) for s in scores)


def test_texts_are_those_of_the_published_loop(decoder: Decoder, tmp_path: Path) -> None:
    config, _ = canvases.write("sdar", tmp_path, 4)
    oracle = Oracle(tmp_path, config["block_size"])
    found, _ = run(decoder, has_graphs=True)
    for i, prompt in enumerate(PROMPTS):
        assert found[f"0r{i}"] == oracle.fill(prompt, 11, 0.95)[0]


def test_captured_passes_replace_tokens_as_the_published_loop_does(decoder: Decoder, tmp_path: Path) -> None:
    assert decoder.spec.canvas is not None
    edits = replace(decoder.spec.canvas, threshold=0.05, edit_threshold=0.0)
    edited = copy(decoder)
    edited.spec = replace(decoder.spec, canvas=edits)
    plain, _ = run(edited, has_graphs=False)
    found, side = run(edited, has_graphs=True)
    assert found == plain
    assert side.replay.checks is not None
    assert side.replay.checks.graphs
    config, _ = canvases.write("sdar", tmp_path, 4)
    oracle = Oracle(tmp_path, config["block_size"])
    for turn, presence in ((0, 0.0), (2, 0.6)):
        wanted = [oracle.edit(prompt, 11, 0.05, 0.0, presence=presence) for prompt in PROMPTS]
        assert any(one.replaced for one in wanted)
        assert [found[f"{turn}r{i}"] for i in range(len(PROMPTS))] == [one.token_ids for one in wanted]


def test_scores_of_draws_are_log_probabilities_of_the_logits() -> None:
    logits = torch.randn(3, 97) * 3
    ids = torch.tensor([4, 0, 96])
    found = Sampler(97).score(logits, ids)
    assert torch.allclose(found, logits.log_softmax(-1)[torch.arange(3), ids], atol=1e-6)
