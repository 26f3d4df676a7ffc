"""What an image is of: each file that decides what is in it has another key when it changes."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from plait import LLM
from plait.checkpoint.find_files import find_model
from plait.checkpoint.list_texts import list_texts
from plait.config import EngineConfig
from plait.loading.image.key import key_of
from plait.loading.image.start import load_image

SIZES = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "max_model_len": 64, "threads": 1, "device": "cpu"}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    """With a pooling of its own, as sentence-transformers keeps it."""
    made = Path(shutil.copytree(nano_hybrid, tmp_path / "model"))
    (made / "modules.json").write_text(json.dumps(MODULES))
    (made / "1_Pooling").mkdir()
    pool(made, "lasttoken")
    return made


def pool(model: Path, mode: str) -> None:
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))


def test_an_image_with_another_pooling_is_not_used(model: Path, tmp_path: Path, kernel_folder: Path) -> None:
    """An image has what is behind the last hidden state, so vectors would be pooled as they were before."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernel_folder)
    config = EngineConfig(**SIZES, cache_dir=str(cache))
    with LLM(str(model), **SIZES, cache_dir=str(cache)) as llm:
        assert "written to" in llm.keep_image(1 << 40)
        last = llm.embed("In the beginning")
    image = load_image(str(model), config)
    assert image is not None
    assert image.front.head.pooling == "last"
    image.front.close()
    pool(model, "mean")
    assert load_image(str(model), config) is None
    with LLM(str(model), **SIZES, cache_dir=str(cache)) as llm:
        assert llm.embed("In the beginning") != last


def test_texts_are_named_with_the_files_of_modules(model: Path) -> None:
    names = [name for name, _ in list_texts(find_model(model))]
    assert names == sorted(names)
    assert {"config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json"} <= set(names)


@pytest.mark.parametrize(
    "raw", ["", "[", "{}", "[1, {}]", '[{"path": 1}]', '[{"path": "\\u0000"}]', "[" * 9999]
)
def test_modules_that_cannot_be_read_have_no_files(raw: str, model: Path) -> None:
    (model / "modules.json").write_text(raw)
    assert not [name for name, _ in list_texts(find_model(model)) if "Pooling" in name]


@pytest.mark.parametrize("option", ["vocab", "chat_template"])
def test_a_file_that_an_option_names_is_in_the_key(option: str, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    files, config = find_model(model), EngineConfig(**SIZES, **{option: str(own)})
    found = [key_of(files, config)]
    for text in ("one", "two"):
        own.write_text(text)
        found.append(key_of(files, config))
    assert all(one != other for one, other in pairwise(found))
    assert found[-1] == key_of(files, config)
