"""A step of every family as a program: recorded, replayed bit for bit, and what cannot be says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.engine.load import Loaded
from plait.runner.graphs import recorded
from plait.runner.inputs import build_batch
from tests.families import tiny
from tests.runner.recordings import (
    BLOCK,
    CAPACITY,
    OXIDIZR,
    STRETCHED,
    contents,
    loaded,
    memory,
    walk,
    write,
)

NAMES = [*tiny.VARIANTS, *(f"oxidizr_{name}" for name in OXIDIZR)]
# All that cannot be recorded, and why.
NOT_CAUSAL = "the model is not causal: a step has no fixed form"
OP_BY_OP = {"oxidizr_hybrid_exact": NOT_CAUSAL, "oxidizr_mamba3_exact": NOT_CAUSAL}
# With weights in blocks, activations are rounded: a number at the edge of two may go to either.
QUANTIZED = ["llama", "qwen2_moe", "gemma3", "deepseek_v3", "bamba", "nemotron_h", "oxidizr_mamba3_wide"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def folder_of(name: str, root: Path) -> Path:
    if not (root / name / "model.safetensors").exists():
        if name in tiny.VARIANTS:
            tiny.write(name, root / name)
        else:
            write(OXIDIZR[name.removeprefix("oxidizr_")], root / name)
    return root / name


def options_of(name: str) -> dict[str, Any]:
    model = OXIDIZR.get(name.removeprefix("oxidizr_"))
    return {"set": STRETCHED.get(name, ()), **(model.options if model else {})}


@torch.inference_mode()
def assert_replayed(model: Loaded, reference: Loaded | None) -> None:
    """Through one walk the program's logits and memory are, bit for bit, those of the ops one by one."""
    runner = model.runner
    groups, decoder = runner.groups, runner.decoder
    one, other = memory(model), memory(model)
    replay, static, why = recorded(decoder, one, runner.executor, groups, CAPACITY)
    assert replay is not None, why
    assert static is not None
    third = memory(reference) if reference else None
    for plan in walk(groups, decoder.spec.vocab_size):
        for store in (one, other, third):
            if store:
                store.zero_slots(plan.fresh)
        assert static.fits(plan)
        batch = build_batch(plan, groups, BLOCK, runner.device)
        got, want = replay(plan), decoder(batch, other)
        assert got.shape == (sum(chunk.num_logits for chunk in plan.chunks), decoder.spec.vocab_size)
        assert torch.equal(got, want), f"step {plan.step}: {(got - want).abs().max()}"
        if reference and third:
            told = reference.runner.decoder(batch, third)
            torch.testing.assert_close(got, told, atol=2e-4, rtol=1e-4)
    for a, b in zip(contents(one, decoder.states), contents(other, decoder.states), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OP_BY_OP])
def test_a_step_of_every_family_is_recorded(name: str, checkpoints: Path) -> None:
    folder, options = folder_of(name, checkpoints), options_of(name)
    with loaded(folder, **options) as model, loaded(folder, **options, ops="reference") as reference:
        assert model.runner.is_recorded, model.runner.step_kind
        assert not reference.runner.is_recorded
        assert_replayed(model, reference)


@pytest.mark.parametrize("name", QUANTIZED)
def test_so_is_one_of_quantized_weights(name: str, checkpoints: Path) -> None:
    options = {**options_of(name), "quantize": "q8_0", "kv_dtype": "bfloat16"}
    with loaded(folder_of(name, checkpoints), **options) as model:
        assert model.runner.is_recorded, model.runner.step_kind
        assert_replayed(model, None)


@pytest.mark.parametrize("name", OP_BY_OP)
def test_what_cannot_be_recorded_says_why(name: str, checkpoints: Path) -> None:
    with loaded(folder_of(name, checkpoints), **options_of(name)) as model:
        assert not model.runner.is_recorded
        assert model.runner.step_kind == OP_BY_OP[name]
        row = next(binding for binding in model.target.bound if binding.op == "step")
        assert (row.variant, row.user) == ("op by op", OP_BY_OP[name])
