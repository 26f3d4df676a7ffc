"""Turing (sm_75): Triton has no matrix units there, so torch multiplies, and all other kernels are ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.cli.common.doctor_checks import MATRIX_GPU, OLDEST_GPU
from plait.kernels.load import load_for_gpu
from plait.kernels.triton.forms import KernelForm
from plait.ops.chip import EXAMPLES, OLDEST, PRODUCTS
from plait.ops.registry import REGISTRY, TRITON, OpFacts
from tools.compile_kernels import load_forms

ROOT = Path(__file__).resolve().parents[3]
UNITS = ("HMMA", "HGMMA")
MULTIPLY = {
    "linear", "add_linear", "norm_linear", "norm_glu", "map_heads", "experts", "add_experts",
    "paged_attention", "paged_latent_attention", "relative_attention",
    "choose_entries", "entry_attention", "front_attention", "choose_keys", "sparse_latent_attention",
    "choose_blocks", "block_sparse_attention", "choose_entry_blocks", "choose_among_blocks",
}  # fmt: skip
CHUNKS = ("delta_chunks", "mamba2_chunks")  # which refuse by themselves: the scans walk there
# What multiplies without an op of its own: `glu`, over weights that `linear` has packed.
BESIDE = (
    *("linear.few_rows", "linear.many_rows", "linear.dense_forms", "linear.linear"),
    "attention.attention_forms",
)


def list_products() -> set[str]:
    """Modules with forms that need matrix units."""
    load_for_gpu()
    return {module for module, form in load_forms() if any(set(UNITS) & set(some) for some in form.demands)}


def test_no_product_of_triton_is_bound_there_and_the_reason_is_reported() -> None:
    load_for_gpu()
    sizes = {"kv_dtype": "model", "block_size": 16, "dim": 64, "kv_rank": 64, "rope_dim": 16, "n_in": 64}
    for op in (REGISTRY[name] for name in sorted(MULTIPLY)):
        assert op.is_product
        old = OpFacts("cuda", torch.float16, sizes, chip=EXAMPLES[75])
        for variant in op.variants:
            if variant.module.startswith(TRITON) and variant.on == "cuda":
                why = variant.refusal(old)
                assert why == "Triton uses no matrix units of an sm_75 as T4, but from sm_80 on"
                assert variant.refusal(replace(old, chip=EXAMPLES[80])) != why


def test_every_module_with_products_is_of_an_op_that_is_refused_there() -> None:
    """A new kernel with products must not come to be bound where it spills."""
    ours = {variant.module for op in REGISTRY.values() for variant in op.variants if op.name in MULTIPLY}
    for module in sorted(list_products()):
        known = module in ours or module.endswith((*CHUNKS, *BESIDE)) or ".linear." in module
        assert known or module.startswith(f"{TRITON}moe."), module


def test_doctor_has_the_same_limits() -> None:
    assert (round(10 * OLDEST_GPU), round(10 * MATRIX_GPU)) == (OLDEST, PRODUCTS)


def list_others() -> Iterator[KernelForm]:
    """One form in float16 of each kernel that multiplies no matrices, in modules without products."""
    seen, products = set[int](), list_products()
    for module, form in load_forms():
        if module in products or id(form.kernel) in seen:
            continue
        seen.add(id(form.kernel))
        types = {name: kind.replace("bf16", "fp16") for name, kind in form.types.items()}
        yield replace(form, types=types)


@pytest.mark.slow
def test_kernels_without_products_compile_there_without_spills() -> None:
    """In a process of its own: this one may have the interpreter's kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.test_turing"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) > 25
    assert [line for line in lines if not line.endswith(": ok")] == []


def main() -> None:
    """Compile each of them for sm_75, and print what is wrong with it."""
    from tools.compile_kernels import measure_form

    for form in list_others():
        made = measure_form(form, 75)
        sys.stdout.write(f"{form.name}: {'; '.join(made.faults) or 'ok'}\n")


if __name__ == "__main__":
    main()
