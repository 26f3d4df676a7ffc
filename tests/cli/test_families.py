"""`plait families`: what is served, from which files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from plait.families.common.registry import families


def test_families_are_listed_with_their_names_and_formats(plait: Callable[..., Any]) -> None:
    result = plait("families", "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    found = {entry["family"]: entry for entry in facts["families"]}
    assert set(found) == {entry.name for entry in families()}
    gemma = found["gemma4_text"]
    assert gemma["architectures"] == ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"]
    assert gemma["model_types"] == ["gemma4_text", "gemma4"]
    assert {"llama", "internlm2", "exaone"} <= set(found["llama"]["gguf"])
    assert found["llama"]["names_only"]
    assert found["gemma4_text"]["gguf"] == ["gemma4"]
    assert "encoder" in facts["refused"]["bart"]


def test_families_are_a_table_for_readers(plait: Callable[..., Any]) -> None:
    lines = plait("families").out.splitlines()
    assert lines[0] == f"{len(families())} families, all of them from Hugging Face's files"
    assert any(line.split()[:2] == ["mamba2", "mamba2"] for line in lines)
    assert any("reformer" in line and "random rotations" in line for line in lines)
    assert any(line.endswith("a decoder alone is built") for line in lines)
