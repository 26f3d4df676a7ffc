"""Branches that have the weights of an earlier one: these are read, packed and counted once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from plait.checkpoint.shared_weights import SharedWeights
from plait.checkpoint.weights import Target, Weights
from plait.model.decoder import Decoder
from plait.spec.model import ModelSpec
from plait.verify.tiny.models import CONFIGS, write_model
from tests.families import tiny
from tests.families.parity import Memory, resolved

READ: list[str] = []


class Counted(Memory):
    def read(self, name: str) -> torch.Tensor:
        READ.append(name)
        return super().read(name)


@pytest.fixture
def built(tmp_path: Path) -> tuple[Decoder, Weights, ModelSpec]:
    READ.clear()
    config = CONFIGS["cycles"]
    write_model(config, tmp_path)
    file = Counted(tiny.load_file(tmp_path / "model.safetensors"))
    found = resolved(file, config)
    weights = Weights(
        file, found.names, Target(torch.device("cpu"), torch.float32, 64, found.spec.hidden_size)
    )
    return Decoder(found.spec, weights), weights, found.spec


def test_a_stack_that_runs_again_has_the_linear_layers_of_its_first_run(
    built: tuple[Decoder, Weights, ModelSpec],
) -> None:
    decoder, weights, spec = built
    weights.check_all_used()
    assert max(Counter(READ).values()) == 4  # the parts of what is gate, queries, keys and values
    by_name = {
        name: branch.mixer for (name, _), branch in zip(spec.branches(), decoder.branches, strict=True)
    }
    first, again, other = (by_name[f"layers.{i}.attn"] for i in (0, 2, 4))
    assert first.qkv is again.qkv
    assert first.qkv is not other.qkv
    assert set(first.states) == {"layers.0.attn"}
    assert set(again.states) == {"layers.2.attn"}
    numbers = sum(p.numel() for p in map(weights.checkpoint.read, weights.checkpoint.names()))
    assert weights.target.weights_nbytes == 4 * numbers


def test_views_of_one_origin_keep_their_own_names(built: tuple[Decoder, Weights, ModelSpec]) -> None:
    view = SharedWeights.of(built[1].scope("layers.6.attn"), "layers.0.attn")
    assert view.scope("q").prefix == "layers.6.attn.q"
    assert view.linear("o", in_size=40, out_sizes=(32,)) is SharedWeights.of(
        built[1].scope("layers.8.attn"), "layers.0.attn"
    ).linear("o", in_size=40, out_sizes=(32,))
    assert "q.weight" in view
    assert "nothing.weight" not in view
