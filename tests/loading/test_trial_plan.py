"""Which trials a model gets: each kernel, over weights that are stored as the model's are."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from plait.checkpoint.names import NameMap
from plait.checkpoint.synthetic import Synthetic
from plait.checkpoint.weights import Target, Weights
from plait.kernels.load import load_for_gpu
from plait.loading.kernel_trials.attempts import KernelTrial
from plait.loading.kernel_trials.plan import TrialNeeds, plan_trials
from plait.ops.blocks import is_storage, random_weight
from plait.ops.chip import EXAMPLES
from plait.ops.moe import experts
from plait.ops.registry import REGISTRY, Op, OpFacts

CHIP, FLOAT = EXAMPLES[90], torch.float32
WITHOUT_CASES = ("int4_g32", "int3_g32", "int6_g128", "int8_g32", "fp8_b64", "bnb_fp4", "IQ2_S")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_for_gpu()


def plan(*formats: str, kinds: tuple[str, ...] = ("silu",)) -> dict[str, KernelTrial]:
    used = dict.fromkeys(("linear", "embed", "map_heads", "spread_heads"), ()) | {"experts": kinds}
    return {t.key: t for t in plan_trials(TrialNeeds(CHIP, [FLOAT], formats, used=used))}


def variant_of(op: Op, trials: dict[str, str], **sizes: object) -> str:
    return op.bind(OpFacts("cuda", FLOAT, sizes, chip=replace(CHIP, trials=trials)))[1].variant


@pytest.mark.parametrize("storage", WITHOUT_CASES)
def test_each_storage_of_a_model_has_trials_of_its_own(storage: str) -> None:
    found = plan(storage)
    variants = {"embed": "planes"}
    for name in ("linear", "embed", "map_heads", "experts", "spread_heads"):
        own = f"{name}/{variants.get(name, 'triton')}/{storage}{'+silu' * (name == 'experts')}/float32"
        assert own in found
        for case in found[own].cases:
            sizes = case.apply(REGISTRY[found[own].op].cases)
            made = random_weight(f"{sizes.get('stored') or sizes['kind']}{sizes.get('more', '')}", 256, 512)
            assert made.format == storage
    others = {key.split("/")[2].partition("+")[0] for key in found} - {storage}
    assert not any(map(is_storage, others)), "the model has no such weights"


def test_integers_are_tried_with_zeros_and_in_an_order_of_columns() -> None:
    cases = plan("int4_g128", kinds=("swiglu_oai",))["experts/triton/int4_g128+swiglu_oai/float32"].cases
    sizes = [case.apply(experts.cases) for case in cases]
    assert {(case["stored"], case["tokens"]) for case in sizes} == {
        (f"int4_g128{more}", tokens) for more in ("", "+zeros+order") for tokens in (2, 67)
    }
    assert {case["kind"] for case in sizes} == {"swiglu_oai"}


def test_experts_are_chosen_by_the_trials_of_their_own_storages_and_activation() -> None:
    trials = dict.fromkeys(plan("Q4_K", "Q6_K", "mxfp4", kinds=("silu", "swiglu_oai")), "")
    trials |= {
        "experts/triton/Q6_K+silu/float32": "it hangs",
        "experts/triton/mxfp4+swiglu_oai/float32": "it is off",
    }

    def chosen(kind: str, *stored: str) -> str:
        return variant_of(experts, trials, kind=kind, stored=stored)

    assert chosen("silu") == chosen("silu", "Q4_K") == chosen("silu", "mxfp4") == "triton"
    assert chosen("silu", "Q6_K") == chosen("silu", "Q4_K", "Q6_K") == "reference"
    assert chosen("swiglu_oai", "mxfp4") == "reference"
    assert chosen("silu", "Q5_K") == "reference", "untried: it shares the fate of all"
    assert variant_of(REGISTRY["map_heads"], trials, kind="Q4_K+Q6_K") == "triton"
    trials["map_heads/triton/Q6_K/float32"] = "it hangs"
    assert variant_of(REGISTRY["map_heads"], trials, kind="Q4_K+Q6_K") == "reference"


class Stored(Synthetic):
    def format_of(self, name: str) -> str:
        return {"a.down.weight": "Q6_K", "b.down.weight": "Q4_K"}.get(name, "bfloat16")


@pytest.mark.parametrize(
    ("quantize", "n_in", "found"),
    [
        (None, 256, ("Q4_K", "Q6_K")),
        ("q8_0", 256, ("Q4_K", "Q6_K", "Q8_0")),
        ("q4_k", 96, ("Q4_K", "Q5_0", "Q6_K")),
        ("q4_k", 7, ("Q4_K", "Q6_K")),
    ],
)
def test_storages_are_those_of_the_file_and_of_what_is_encoded(
    quantize: str | None, n_in: int, found: tuple[str, ...]
) -> None:
    names = [f"{e}.{name}" for e in "ab" for name in ("up", "down")]
    files = Stored({f"{name}.weight": (8, n_in) for name in names})
    target = Target(torch.device("cpu"), FLOAT, 64, n_in, chip=replace(CHIP, trials={"a/b//float32": ""}))
    target.quantize = quantize
    w = Weights(files, NameMap({"ours.{e}.{name}": "{e}.{name}"}), target).scope("ours")
    assert w.list_storages([*names, "a.unknown"], n_in) == found
    target.chip = CHIP
    assert w.list_storages(names, n_in) == (), "nothing was tried"
