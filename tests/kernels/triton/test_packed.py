"""Triton's products with packed weights: in its interpreter against the reference, and compiled for a GPU.

Triton comes with torch for GPUs; without it there is nothing to test.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from plait.kernels.load import load_for_gpu
from plait.ops.blocks import random_weight
from plait.ops.linear import linear
from plait.ops.registry import OpFacts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)
READ = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "int4_g128", "int4_g32+bfloat16+zeros", "int8", "fp8", "fp8_b128")
COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from plait.kernels.triton import packed

kind = sys.argv[1]
span, stored = packed.span_of(kind, 4096), kind in packed.BYTES
pairs = kind in ("Q4_0", "Q4_K", "Q6_K", "int4")
run = 32 if kind == "Q4_K" or not pairs else 16
const = dict(KIND=kind, SPAN=span, STEPS=4096 // span, GROUP=128, TALL=128 if kind == "fp8" else 1)
const |= dict(ZEROS=kind.startswith("int"), GROUPS=span // run // (1 + pairs), RUN=run, PAIRS=pairs)
const |= dict(STORED=stored, BN=packed.ROWS, BM=packed.MOST)
names = packed.small_product.arg_names
kinds = dict(x="*bf16", codes="*u8", scales="*u8" if stored else "*fp32", zeros="*u8", out="*fp32")
signature = {n: kinds.get(n, "constexpr" if n in const else "i32") for n in names}
source = ASTSource(
    packed.small_product, signature=signature, constexprs={(names.index(n),): v for n, v in const.items()}
)
made = compile(source, target=GPUTarget("cuda", 90, 32))
assert made.metadata.shared <= 227 << 10, made.metadata.shared
assert made.asm["ptx"].count("mma.sync") or made.asm["ptx"].count("wgmma"), "no product of matrices"
"""


@pytest.fixture(scope="module")
def packed() -> Any:
    """The kernels, interpreted: see `conftest.py`."""
    return importlib.import_module("plait.kernels.triton.packed")


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(("rows", "n_out", "n_in"), [(1, 50, 512), (3, 96, 768), (16, 33, 256)])
def test_few_rows_times_a_packed_weight(packed: Any, kind: str, rows: int, n_out: int, n_in: int) -> None:
    torch.manual_seed(1)
    weight, bias = random_weight(kind, n_out, n_in), torch.randn(n_out)
    assert packed.reads(weight)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(1, rows, n_in).to(dtype)
        found = packed.multiply(x, weight, bias.to(dtype))
        wanted = linear.reference(x, weight, bias.to(dtype))
        bound = linear.tolerance[dtype]
        assert found.dtype is dtype
        torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


def test_parts_of_weights_are_read_where_they_lie(packed: Any) -> None:
    x = torch.randn(2, 256)
    for kind in ("Q4_K", "int4_g128", "int4_g64+zeros", "fp8_b128"):
        whole = random_weight(kind, 64, 512)
        part = whole.rows(7, 40).cols(256, 512)
        torch.testing.assert_close(
            packed.multiply(x, part, None), linear.reference(x, part, None), atol=5e-5, rtol=5e-5
        )


def test_what_the_kernel_does_not_read_goes_to_the_reference(
    packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_launched", None)
    for kind, rows in (("int4_g64+zeros+order", 1), ("int3_g128", 1), ("mxfp4", 1), ("Q4_K", 17)):
        weight, x = random_weight(kind, 48, 256), torch.randn(rows, 256)
        assert torch.equal(packed.multiply(x, weight, None), linear.reference(x, weight, None))


@pytest.mark.parametrize(("n_out", "steps"), [(32, 16), (4096, 16), (100, 7), (131072, 56)])
def test_shares_of_the_inputs_are_whole_and_fill_a_device(packed: Any, n_out: int, steps: int) -> None:
    shares = packed.shares_of(n_out, steps)
    assert steps % shares == 0
    assert shares == 1 or shares * -(-n_out // packed.ROWS) <= packed.PROGRAMS


def test_a_kernel_that_is_off_or_does_not_run_is_refused_with_the_reason(
    packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed.trial.cache_clear()
    assert [packed.trial(kind, torch.float32, "cpu") for kind in packed.TRIED] == [None] * len(packed.TRIED)
    packed.trial.cache_clear()
    right = packed._launched
    monkeypatch.setattr(packed, "_launched", lambda x, weight, launch: right(x, weight, launch) * 1.1)
    assert "is off by" in packed.trial("Q4_K", torch.float32, "cpu")
    packed.trial.cache_clear()
    monkeypatch.setattr(packed, "_launched", None)
    assert "does not run here: TypeError" in packed.trial("Q4_K", torch.float32, "cpu")
    packed.trial.cache_clear()


def test_a_trial_leaves_the_random_numbers_of_host_and_devices_as_they_were(
    packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    packed.trial.cache_clear()
    before = torch.get_rng_state()
    assert packed.trial("Q8_0", torch.float32, "cpu") is None
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded
    packed.trial.cache_clear()


def test_the_choice_is_made_from_format_and_sizes(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "trial", lambda kind, dtype, device: None)

    def refusal(kind: str, n_in: int) -> str | None:
        reason: str | None = packed.packed_weights(
            OpFacts("cuda", torch.float16, {"kind": kind, "n_in": n_in})
        )
        return reason

    for kind in ("Q4_K", "Q8_0", "int4", "int4_g32", "int8", "fp8", "fp8_b128"):
        assert refusal(kind, 512) is None
    for kind in ("Q5_K", "int3_g128", "mxfp4", "bfloat16"):
        assert "not" in str(refusal(kind, 512))
    assert "no whole blocks" in str(refusal("Q4_K", 384))
    assert "no whole blocks" in str(refusal("fp8", 100))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "int4", "int8", "fp8"])
def test_it_compiles_for_a_gpu_that_is_not_here(kind: str) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, kind], env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_a_device_the_reference_is_bound_and_the_reason_is_said(packed: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    load_for_gpu()
    packed.trial.cache_clear()
    fn, row = linear.bind(OpFacts("cuda", torch.bfloat16, {"kind": "Q4_K", "n_in": 512, "n_out": 64}))
    assert (fn, row.variant) == (linear.reference, "reference")
    assert any(name == packed.NAME and "does not run here" in why for name, why in row.skipped)
