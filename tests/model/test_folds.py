"""Norms between branches that linear layers compute: which models have them, and what keeps a norm apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.weights import Target, Weights
from plait.kernels.load import load_for_gpu
from plait.loading.meta.meta_model import list_ops
from plait.model.decoder import Decoder
from plait.ops.chip import EXAMPLES
from plait.ops.folded_norm import MOST_ROWS
from plait.ops.registry import REGISTRY
from tests.families.every import read_model
from tests.families.parity import CPU, LONGEST, Session, resolved
from tests.kernels.triton.test_whole_models import differ, run_steps

load_for_gpu()
JOINS = ("norm_add", "norm_add_norm")
FOLDS = (*JOINS, "add_linear", "norm_linear", "norm_glu", "add_experts", "norm_route")
CHIP = EXAMPLES[90]


def build(name: str, folder: Path, **options: object) -> tuple[Decoder, Counter[str]]:
    """A family's tiny model as a GPU would bind it, and how often each op of a folded norm is bound."""
    config, checkpoint = read_model(name, folder)
    found = resolved(checkpoint, config)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size, chip=CHIP)
    for key, value in options.items():
        setattr(target, key, value)
    built = Decoder(found.spec, Weights(checkpoint, found.names, target))
    return built, Counter(row.op for row in target.bound if row.op in FOLDS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"add_linear": 5, "norm_glu": 3, "norm_linear": 2}),  # three layers of two branches
        ("minicpm", {"add_linear": 5, "norm_glu": 3, "norm_linear": 2}),  # residuals with a factor
        ("mamba2", {"add_linear": 2, "norm_linear": 2}),
        (  # its second MLP is dense
            "qwen3_moe",
            {"add_linear": 4, "norm_linear": 4, "norm_route": 2, "add_experts": 1, "norm_glu": 1},
        ),
        ("gpt_oss", {"add_linear": 3, "norm_linear": 5, "norm_route": 3, "add_experts": 2}),
        ("olmoe", {"add_linear": 3, "norm_linear": 5, "norm_route": 3, "add_experts": 2}),
        ("phimoe", {}),  # no RMS norm
        ("gemma4", {"norm_add_norm": 3}),  # of two branches the second has a factor
        ("gemma2", {"norm_add_norm": 5}),  # a norm behind each branch, too
        ("olmo2", {"norm_add": 5}),  # a norm behind each branch alone
        ("cohere", {}),  # no RMS norm
    ],
)
def test_which_norms_are_folded(name: str, expected: dict[str, int], tmp_path: Path) -> None:
    assert build(name, tmp_path)[1] == expected
    config, checkpoint = read_model(name, tmp_path / "again")
    announced = list_ops(resolved(checkpoint, config), checkpoint)
    assert not expected.keys() - announced.keys(), "a GPU binds no kernel that it has not tried"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"deterministic": True},
        {"ops": "reference"},
        {"no_fuse": ("add_linear",)},
        {"no_fuse": ("norm_linear", "norm_glu")},
        {"chip": replace(CHIP, trials={"add_linear/triton//float32": "it is off"})},
        {"chip": None},
    ],
    ids=str,
)
def test_what_keeps_norms_apart(options: dict[str, object], tmp_path: Path) -> None:
    assert not build("llama", tmp_path, **options)[1]


@pytest.mark.parametrize(
    "name", ["llama", "minicpm", "mamba2", "qwen3_moe", "gpt_oss", "jamba", "gemma3", "olmo2"]
)
def test_folded_norms_give_the_logits_of_norms_apart(name: str, tmp_path: Path) -> None:
    folded, _ = build(name, tmp_path)
    apart, found = build(name, tmp_path, no_fuse=FOLDS)
    assert not found
    assert differ(run_steps(folded), run_steps(apart)) < 1e-5


def test_experts_of_which_the_own_kernel_is_wrong_end_no_branch(tmp_path: Path) -> None:
    """Their weights are then laid out for other kernels."""
    tried = {f"{name}/triton/any/float32": "" for name, one in REGISTRY.items() if one.variants}
    for why, count in (("", 2), ("it is off", 0)):
        chip = replace(CHIP, trials={**tried, "experts/triton/any/float32": why})
        model, found = build("olmoe", tmp_path, chip=chip)
        assert found["add_experts"] == count
        assert found["norm_route"] == 3
    apart, _ = build("olmoe", tmp_path, no_fuse=FOLDS)
    assert differ(run_steps(model), run_steps(apart)) < 1e-5


def test_a_step_of_more_rows_has_the_bits_of_norms_apart(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (MOST_ROWS + 1,), generator=torch.Generator().manual_seed(3))
    results = []
    for no_fuse in ((), FOLDS):
        model, _ = build("llama", tmp_path, no_fuse=no_fuse)
        with torch.inference_mode():
            results += Session(model, 16).step([(0, 0, ids)])
    assert torch.equal(*results)
