"""Kernels are found by where their modules lie; no list names them."""

from __future__ import annotations

from pathlib import Path

from plait.kernels import cpu
from plait.kernels.load import cpu_kernels, load_kernels
from plait.model.mixers.registry import list_mixers
from plait.ops.registry import REGISTRY

list_mixers()  # registers every op that a model can use
ROOT = Path(cpu.__file__).parent


def test_load_finds_every_module_that_registers_a_variant() -> None:
    registers = {path for path in ROOT.rglob("*.py") if ".variant(" in path.read_text(encoding="utf-8")}
    names = {
        ".".join(("plait.kernels.cpu", *path.relative_to(ROOT).with_suffix("").parts)) for path in registers
    }
    assert registers
    assert names <= set(cpu_kernels())
    assert cpu_kernels() == sorted(cpu_kernels())


def test_variants_that_refine_others_are_tried_first() -> None:
    load_kernels()
    for op, order in {
        "linear": ("amx-bf16", "native-amx", "native", "dense"),
        "paged_attention": ("amx-bf16", "native-bf16", "native", "sdpa"),
        "map_heads": ("native-stored", "native"),
    }.items():
        found = [variant.name for variant in REGISTRY[op].variants if variant.on == "cpu"]
        assert [name for name in found if name in order] == list(order)
