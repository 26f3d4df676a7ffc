"""What a GPU would run of models that write on canvases: their step is a pass over these."""

from __future__ import annotations

from pathlib import Path

from plait.config import EngineConfig
from plait.loading.example_gpu import SEQS, ExampleStep, try_example
from plait.ops.chip import EXAMPLES
from tests.families import canvases, noisy_canvases


def step_of(folder: Path) -> ExampleStep:
    found = try_example(str(folder), EngineConfig(), EXAMPLES[90], lambda *_: None)
    assert (found.kind, found.num_seqs) == ("pass over canvases", SEQS)
    assert not found.faults
    return found


def test_a_pass_over_masks_runs_the_layers_alone(tmp_path: Path) -> None:
    config, tensors = canvases.write("sdar", tmp_path)
    canvases.save(tmp_path / "model", config, tensors)
    launches = step_of(tmp_path / "model").launches
    assert launches["attend"] == config["num_hidden_layers"]
    assert "softmax" not in launches


def test_a_pass_over_noise_also_mixes_embeddings_of_each_canvas(tmp_path: Path) -> None:
    noisy_canvases.write(tmp_path)
    launches = step_of(tmp_path).launches
    assert launches["attend"] == noisy_canvases.TEXT["num_hidden_layers"]
    assert launches["softmax"] == SEQS
