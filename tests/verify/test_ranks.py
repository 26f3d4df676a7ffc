"""`plait verify --tp`: what is promised is kept, and a sum that is wrong is found by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from plait.cli.verify import rank_lines
from plait.config import EngineConfig
from plait.loading.build import load
from plait.verify import ranks
from plait.verify.ranks import RankCheck, check_ranks
from tests.families import tiny

NANO = str(Path(__file__).parents[2] / "examples" / "nano-hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--deterministic",), ("--ops", "reference"), ("--ep",)])
def test_two_ranks_keep_what_is_promised(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "plait", "verify", NANO, "--cpu", "--tp", "2", "--max-tokens", "4"]
    done = subprocess.run([*command, "--json", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["num_ranks"] == 2
    assert found["num_tokens"] == 4 * found["num_replies"] > 0
    # With --ep alone inputs are rounded: a close choice of tokens may end otherwise (docs/parallel.md).
    assert "--ep" in options or not found["other_tokens"]
    if "--deterministic" in options:
        assert not found["other_bits"]
        assert found["largest"] == 0.0


def test_a_sum_that_is_wrong_on_ranks_is_found_by_its_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.write("bamba", tmp_path)
    loads: list[Callable[..., object]] = []

    def load_wrong(model: str, config: EngineConfig, report: object) -> object:
        """The second time, as of ranks, one layer adds too much."""
        loaded = load(model, EngineConfig(device="cpu", ops="reference", max_num_seqs=1))
        if loads:
            branch = loaded.runner.decoder.branches[3]
            mixer = branch.mixer
            states = mixer.states

            def wrong(h: Tensor, *where: object) -> Tensor:
                y: Tensor = mixer(h, *where) * 1.01  # type: ignore[arg-type]
                return y

            branch.mixer = wrong  # type: ignore[assignment]
            branch.mixer.states = states
        loads.append(load)
        return loaded

    monkeypatch.setattr(ranks, "load", load_wrong)
    config = EngineConfig(device="cpu", ops="reference", tensor_parallel_size=2, max_num_seqs=1)
    found = check_ranks(str(tmp_path), config, max_tokens=2, prompts=[(5, 9, 2)], say=lambda text: None)
    assert not found.is_right
    assert found.place is not None
    assert found.place.where == "layers.1.ffn"
    assert "the sum over ranks" in str(found.place)
    assert "NOT as promised" in rank_lines(found)[-1]


def test_each_promise_has_its_own_verdict() -> None:
    sizes = {"num_ranks": 2, "num_shares": 2, "num_replies": 4, "num_tokens": 8, "place": None}
    rounded = {"other_tokens": (), "other_bits": ("a",), "largest": 1e-4}
    assert RankCheck(**sizes, **rounded, is_exact=False, is_float32=False).is_right
    assert not RankCheck(**sizes, **rounded, is_exact=False, is_float32=True).is_right
    assert not RankCheck(**sizes, **rounded, is_exact=True, is_float32=False).is_right
    other = {"other_tokens": ("drawn",), "other_bits": ("a",)}
    assert RankCheck(**sizes, **other, largest=1e-3, is_exact=False, is_float32=False).is_right
    assert not RankCheck(**sizes, **other, largest=0.1, is_exact=False, is_float32=False).is_right
    assert not RankCheck(**sizes, **other, largest=0.0, is_exact=False, is_float32=True).is_right
