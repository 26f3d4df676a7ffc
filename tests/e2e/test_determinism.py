"""Determinism as a contract: a reply depends on its request alone, to the bit, whatever the engine does.

Every kind of model runs under the whole matrix of `plait verify`. It has batches, prompts in chunks, the
prefix cache, preemption by swap and by computing again, draft tokens, steps that fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.config import EngineConfig
from plait.loading.build import load
from plait.memory import PagedState
from plait.verify.results import CellResult
from plait.verify.verify import Verification
from tests.families import tiny
from tests.runner import recordings

# Grouped queries; windows; latents and experts; Mamba2 alone; and with attention, experts, or in one layer.
KINDS = ("llama", "gemma3", "deepseek_v3", "mamba2", "bamba", "granite", "falcon_h1", "nemotron_h")
# With weights in blocks activations are rounded to int8, 32 neighbours at a time.
QUANTIZED = ("llama_biases", "qwen2_moe", "granite")
OTHERS = [name for name in tiny.VARIANTS if name not in KINDS and name != "llama_dynamic"]


def checkpoint(name: str, root: Path) -> Path:
    folder = root / name
    if name in tiny.VARIANTS:
        tiny.write(name, folder)
    else:
        recordings.write(recordings.OXIDIZR[name.removeprefix("oxidizr_")], folder)
    return folder


def matrix(
    folder: Path, *, batch: int, max_tokens: int, threads: int = 2, **options: Any
) -> tuple[list[CellResult], bool]:
    """What `plait verify` finds, and whether the model has memory that grows and can run out."""
    config = EngineConfig(device="cpu", threads=threads, max_num_seqs=1, **options)
    loaded = load(str(folder), config)
    try:
        made = Verification(loaded, batch=batch, max_tokens=max_tokens)
        assert made.arithmetic.is_promised
        states = loaded.runner.decoder.states.values()
        return [*made.results()], any(isinstance(s, PagedState) and s.window is None for s in states)
    finally:
        loaded.front.close(drain=False)


def assert_same(results: list[CellResult], grows: bool) -> None:
    found = [str(d) for result in results for d in result.differences]
    assert not found, "\n".join(found)
    # Random weights seldom repeat what prompt lookup could find.
    may_be_idle = ("prompt lookup",)
    if not grows:
        may_be_idle += ("preempted", "samplers, preempted", "samplers, swapped")
    idle = [r.cell for r in results if not r.happened and not r.cell.startswith(may_be_idle)]
    assert not idle, f"these settings showed nothing: {idle}"


@pytest.mark.sampled(3, across="determinism")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("granite", "falcon_h1", "gemma3") else n
        for n in KINDS
    ],
)
def test_a_reply_depends_on_its_request_alone(name: str, tmp_path: Path) -> None:
    # One thread: where tests share cores, two wait for each other.
    assert_same(*matrix(checkpoint(name, tmp_path), batch=3, max_tokens=8, threads=1))


@pytest.mark.sampled(3, across="determinism")
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_keys_and_values_kept_as_codes_keep_it_too(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path)
    assert_same(*matrix(folder, batch=3, max_tokens=8, threads=1, kv_dtype="int8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS, "oxidizr_hybrid", "oxidizr_zoo", "oxidizr_mamba3_mimo_conv"])
def test_every_other_family_keeps_it_too(name: str, tmp_path: Path) -> None:
    assert_same(*matrix(checkpoint(name, tmp_path), batch=3, max_tokens=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_in_blocks_keep_it_too(name: str, tmp_path: Path) -> None:
    assert_same(*matrix(checkpoint(name, tmp_path), batch=3, max_tokens=8, quantize="q8_0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_large_batches_and_long_replies_keep_it_too(name: str, tmp_path: Path) -> None:
    assert_same(*matrix(checkpoint(name, tmp_path), batch=9, max_tokens=20))
