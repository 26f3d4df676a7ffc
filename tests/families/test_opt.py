"""OPT of 350M: norms behind the mixers, narrow embeddings, and which table is the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst

TOLERANCE = 1e-4


def written(folder: Path, **changes: Any) -> tuple[dict[str, Any], Memory, dict[str, Any]]:
    """(config, tensors, oracle)."""
    variant = tiny.VARIANTS["opt_350m"]
    tiny.write("opt_350m", folder, replace(variant, changes={**variant.changes, **changes}))
    config, tensors, oracle = tiny.read(folder)
    return config, Memory(tensors), oracle


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [20, 32, 48])
def test_embeddings_of_another_width(width: int, tied: bool, before: bool, tmp_path: Path) -> None:
    changes = {"word_embed_proj_dim": width, "tie_word_embeddings": tied, "do_layer_norm_before": before}
    config, checkpoint, oracle = written(tmp_path, **changes)
    logits = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    assert worst(logits, oracle["logits"][0]) <= TOLERANCE


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_in_the_file_wins_over_a_config_that_ties_it(is_equal: bool, tmp_path: Path) -> None:
    config, checkpoint, oracle = written(tmp_path / "made", tie_word_embeddings=True)
    assert "lm_head.weight" not in checkpoint
    table, generator = checkpoint["model.decoder.embed_tokens.weight"], torch.Generator().manual_seed(3)
    other = torch.randn(table.shape, generator=generator) * 0.2
    checkpoint["lm_head.weight"] = table.clone() if is_equal else other
    folder = tmp_path / "headed"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "made" / "config.json").read_text())
    save_file(dict(checkpoint), folder / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = oracle["ids"][0]
    with torch.no_grad():
        wanted = theirs.eval()(ids[None], use_cache=False).logits[0]
    assert (worst(wanted, oracle["logits"][0]) <= TOLERANCE) == is_equal
    logits = whole(decoder(resolved(checkpoint, config), checkpoint), ids)
    assert worst(logits, wanted) <= TOLERANCE


def test_embeddings_are_not_scaled_whatever_a_config_says(tmp_path: Path) -> None:
    config, checkpoint, oracle = written(tmp_path, scale_embedding=True)
    logits = whole(decoder(resolved(checkpoint, config), checkpoint), oracle["ids"][0])
    assert worst(logits, oracle["logits"][0]) <= TOLERANCE
