"""Levels of processors and shipped kernels: who may load them, and that they are loaded instead of made."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.kernels.cpu.codegen import kernel_cache, levels, target
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.codegen.levels import BASE, DOTPROD, ICE, LEVELS
from plait.kernels.load import load_kernels

SKYLAKE_X = BASE | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "is_amd", "level"),
    [
        pytest.param(BASE | {"sse4a"}, True, "x86-64-v3", id="Zen 3"),
        pytest.param(BASE | {"avxvnni", "gfni"}, False, "x86-64-v3-vnni", id="Alder Lake"),
        pytest.param(ICE | {"avx512bf16", "gfni"}, True, "x86-64-v4-bf16", id="Zen 4"),
        pytest.param(ICE | {"gfni"}, False, "x86-64-v4-vnni", id="Ice Lake"),
        pytest.param(ICE | {"avx512bf16", "amx-tile"}, False, "x86-64-v4-vnni", id="Sapphire Rapids"),
        pytest.param(SKYLAKE_X, False, None, id="Skylake-X: wide, but it adds no bytes by fours"),
        pytest.param(BASE - {"fma"}, False, None, id="no FMA"),
        pytest.param(DOTPROD | {"i8mm", "bf16", "sve"}, False, "armv8-i8mm", id="Neoverse V1"),
        pytest.param(DOTPROD | {"fullfp16"}, False, "armv8-dotprod", id="Neoverse N1"),
        pytest.param(frozenset({"neon", "crc"}), False, None, id="Cortex-A72"),
    ],
)
def test_a_processor_has_the_best_level_that_chooses_the_same_kernels(
    features: frozenset[str], is_amd: bool, level: str | None
) -> None:
    assert next((one.name for one in LEVELS if one.fits(features, is_amd)), None) == level


def test_a_process_that_compiles_for_a_lower_level_loads_nothing_of_a_higher_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lower = next(one for one in LEVELS if one.name == "x86-64-v3")
    monkeypatch.setattr(target, "_level", [lower])
    assert target.level_to_load() is lower


def double(frame: int, args: int, thread: int, threads: int) -> None:
    """A kernel that does nothing: what counts is whether it is compiled."""


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of shipped kernels, with `double` in it."""
    load_kernels()
    if not target._level or target.host_level() is None:
        pytest.skip("kernels of this process are made for this very processor")
    files = target._kept[:]
    target.keep_in(tmp_path / "made")
    assert Kernel(double).address
    assert len(list(tmp_path.glob("made/kernels/*/double-*.kernel"))) == 1
    shutil.copytree(tmp_path / "made" / "kernels", tmp_path / "shipped")
    for module in (levels, kernel_cache):
        monkeypatch.setattr(module, "SHIPPED", tmp_path / "shipped")
    target.keep_in(tmp_path / "empty")
    yield tmp_path / "shipped"
    target._kept[:] = files


def test_a_shipped_kernel_is_loaded_and_kept_nowhere(shipped: Path) -> None:
    kernel = Kernel(double)
    assert kernel.address
    assert kernel.compile_s == 0.0
    assert kernel.object_code(), "a startup image takes the code from where it was shipped"
    assert not list(shipped.parent.glob("empty/kernels/*/*.kernel"))


@pytest.mark.parametrize("how", ["cut", "changed", "another one"])
def test_a_damaged_shipped_kernel_is_compiled(shipped: Path, how: str) -> None:
    (path,) = shipped.glob("*/double-*.kernel")
    data = path.read_bytes()
    damaged = {"cut": data[:-1], "changed": data[:-1] + bytes([data[-1] ^ 1]), "another one": b"plaitkn1" * 9}
    path.write_bytes(damaged[how])
    kernel = Kernel(double)
    assert kernel.address
    assert kernel.compile_s > 0.0
