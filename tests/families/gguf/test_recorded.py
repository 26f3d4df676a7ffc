"""Files as llama.cpp's converter writes them give the logits of transformers: whole and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import UnsupportedModel
from tests.families import tiny
from tests.families.gguf.recorded import NAMES, converted, variant
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

TOLERANCE = 1e-4
QUICK = ("gemma4_all", "exaone4", "ernie4_5_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_recorded_files_answer_what_transformers_answers(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path / name, variant(name))
    config, tensors, oracle = tiny.read(tmp_path / name)
    metadata, made = converted(name, config, tensors)
    file = Memory(made)
    found = resolved(file, gguf=metadata)
    model = decoder(found, file)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= TOLERANCE


def metadata_of(arch: str, **keys: Any) -> dict[str, Any]:
    sizes = {"block_count": 4, "embedding_length": 32, "attention.head_count": 4, "context_length": 64}
    values = {"feed_forward_length": 48, "attention.layer_norm_rms_epsilon": 1e-5, **sizes, **keys}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}}


def test_sizes_that_differ_from_layer_to_layer_are_refused_where_no_family_has_them() -> None:
    with pytest.raises(UnsupportedModel, match=r"differ from layer to layer.*\[4, 6\]"):
        resolved(Memory(), gguf=metadata_of("exaone4", **{"attention.head_count": [4, 6, 4, 4]}))


def test_laguna_files_without_a_pattern_have_one_whole_layer_in_four() -> None:
    from plait.families.gguf.config import gguf_config

    keys = {"attention.sliding_window": 8, "attention.key_length": 8, "rope.freq_base": 5e5}
    config, why = gguf_config(metadata_of("laguna", **keys), {}, lambda name: pytest.fail(name))
    assert [kind.split("_")[0] for kind in config["layer_types"]] == ["full", "sliding", "sliding", "sliding"]
    assert "laguna" in why["layer_types"]
