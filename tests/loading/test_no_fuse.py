"""`no_fuse`: a model without some of its fused ops computes what it did, and shows what runs instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plait import LLM, SamplingParams
from plait.errors import ConfigError
from plait.model.mixers.registry import list_mixers
from plait.ops.registry import REGISTRY
from tests.families import tiny
from tests.runner.recordings import loaded

list_mixers()  # registers every op that a model can use
FUSED = sorted(name for name, op in REGISTRY.items() if op.composition)
EXACT = sorted(name for name in FUSED if (found := REGISTRY[name].composition) and found.exact)
IDS = [1, 5, 2, 9, 3, 7, 4, 4]


def logits(folder: Path, no_fuse: Sequence[str]) -> tuple[torch.Tensor, dict[str, str]]:
    """Those of a short prompt, and which variant runs each fused op and the step."""
    with loaded(folder, no_fuse=no_fuse) as model:
        rows = {
            row.op: row.variant for row in reversed(model.target.bound) if row.replaces or row.op == "step"
        }
        return model.runner.logits(IDS, 4), rows


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_model_without_fused_ops_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path)
    want, fused = logits(tmp_path, ())
    assert fused["step"] == "recorded"
    assert "composition" not in fused.values()
    got, rows = logits(tmp_path, EXACT)
    assert torch.equal(got, want)
    assert {rows[op] for op in EXACT if op in rows} == {"composition"}
    got, rows = logits(tmp_path, FUSED)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert {rows[op] for op in FUSED if op in rows} == {"composition"}
    # The composition of `experts` takes rows by number, which no recording can.
    assert rows["step"] == ("op by op" if "experts" in rows else "recorded")


def test_unknown_fused_op_is_rejected_with_the_names_that_there_are(nano_hybrid: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_fuse: 'gluu' is no op; fused ops are .*glu"):
        LLM(str(nano_hybrid), device="cpu", no_fuse="gluu")
    with LLM(str(nano_hybrid), device="cpu", no_fuse=("glu", "add_rms_norm")) as llm:
        assert llm.generate("The", SamplingParams(max_tokens=2))
