"""`partial_rotary_factor` turns a part of each head where transformers reads it, and nothing elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError, UnsupportedModel
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst

TOLERANCE, SHARE = 1e-4, "partial_rotary_factor"
QUICK = ("phi3", "glm4_moe", "stablelm", "laguna", "llama", "qwen3", "minimax", "gptj", "deepseek_v3_plain")
# What is refused by name, although transformers runs it: it ignores it, or multiplies by part of the angles.
REFUSED = ("gemma4", "lfm3", "glm4_moe_lite", "llama_longrope", "gpt_oss", "deepseek_v4")
EVERY = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(tiny.VARIANTS)
]


def with_share(name: str, share: float, folder: Path) -> tuple[dict[str, Any], Memory, dict[str, Any]]:
    """(config, tensors, oracle) of a tiny model of which the config names this share."""
    variant = tiny.VARIANTS[name]
    changes = {**variant.changes, SHARE: share}
    for nest, inner in variant.changes.items():
        if nest in ("text_config", "llm_config") and isinstance(inner, dict):
            changes[nest] = {**inner, SHARE: share}
    tiny.write(name, folder, replace(variant, changes=changes))
    config, tensors, oracle = tiny.read(folder)
    return config, Memory(tensors), oracle


@pytest.mark.parametrize("name", EVERY)
def test_a_share_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    try:
        config, checkpoint, oracle = with_share(name, 0.25, tmp_path)
    except (RuntimeError, ZeroDivisionError) as error:
        pytest.skip(f"transformers cannot run it: {str(error)[:80]}")
    if name.startswith(REFUSED) and name != "gpt_oss_plain":
        with pytest.raises(UnsupportedModel, match=SHARE):
            resolved(checkpoint, config)
        return
    logits = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    assert worst(logits, oracle["logits"][0]) <= TOLERANCE


def test_a_share_that_nothing_reads_is_refused_where_it_is_set(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"--set {SHARE}=…: this model, of the family llama, does not read it"
    ):
        resolved(Memory(tensors), config, overrides=[f"{SHARE}=0.5"])
    assert resolved(Memory(tensors), config, overrides=[f"{SHARE}=1"])


def test_a_share_next_to_a_scaling_is_refused_where_transformers_cannot_run_it(tmp_path: Path) -> None:
    tiny.write("llama_yarn", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    with pytest.raises(UnsupportedModel, match="next to rope_type 'yarn' is not implemented for llama"):
        resolved(Memory(tensors), {**config, SHARE: 0.5})
