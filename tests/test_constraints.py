"""The versions that the tests run with: those of today, and the oldest that the package allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the tests compare with, and their tools, demand newer versions of these.
NEWER = {"click", "huggingface-hub", "regex", "safetensors", "tokenizers"}
EXTRAS = ("server", "cuda", "hub", "otel", "store", "kv-events", "bench")


def read_pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def read_bounds() -> dict[str, str]:
    """The oldest version of what the package and its extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *(n for x in EXTRAS for n in project["optional-dependencies"][x])]
    found = (re.match(r"([\w.-]+)>=([\d.]+)", need) for need in needs)
    return {match[1]: match[2] for match in found if match}


def as_numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def test_the_oldest_versions_are_those_of_the_metadata() -> None:
    pins, bounds = read_pins("constraints-oldest.txt"), read_bounds()
    assert len(bounds) > 20
    for name in bounds.keys() - NEWER - {"triton"}:  # PyTorch's own build chooses its Triton
        assert as_numbers(pins[name]) == as_numbers(bounds[name]), name
    for name in NEWER:
        assert as_numbers(pins[name]) > as_numbers(bounds[name]), name


def test_what_the_tests_run_with_is_allowed() -> None:
    pins = read_pins("constraints.txt")
    for name, oldest in read_bounds().items():
        if name in pins:
            assert as_numbers(pins[name]) >= as_numbers(oldest), name
