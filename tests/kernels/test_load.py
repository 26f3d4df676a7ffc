"""Kernels are found by where their modules lie; no list names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.kernels import cpu
from plait.kernels.load import cpu_kernels, load_kernels
from plait.model.mixers.registry import list_mixers
from plait.ops.registry import REGISTRY, Op

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


def test_a_name_that_another_module_has_is_refused() -> None:
    op = Op("double", lambda x: 2 * x, (), {})

    def add_up(x: int) -> int:
        return x + x

    op.variant("fast", on="cpu")(add_up)
    op.variant("fast", on="cpu")(add_up)  # a module that runs again
    op.variant("fast", on="cuda")(add_up)
    assert [(variant.name, variant.on) for variant in op.variants] == [("fast", "cuda"), ("fast", "cpu")]

    def shift(x: int) -> int:
        return x << 1

    shift.__module__ = "other"
    with pytest.raises(ConfigError, match=r"on cpu: other registers 'fast', a variant of .*test_load"):
        op.variant("fast", on="cpu")(shift)
