"""What the files of a model say before it is loaded, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.server.models.file_facts import BASE_NBYTES, read_file_facts

TOOLS = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
THINKS = TOOLS + "<think>\n</think>"


def folder(path: Path, config: Any, template: str | None = None) -> Path:
    (path / "model.safetensors").write_bytes(b"x" * 1000)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "llama", "max_position_embeddings": 2048}, 2048),
        ({"model_type": "llama", "text_config": {"n_positions": 99}}, 99),
        ({"model_type": "llama", "thinker_config": {"text_config": {"max_position_embeddings": 256}}}, 256),
        ({"model_type": "llama", "max_position_embeddings": "many"}, None),
    ],
)
def test_a_folder_has_its_context_abilities_and_size(tmp_path: Path, config: Any, length: int | None) -> None:
    found = read_file_facts(str(folder(tmp_path, config, THINKS)), EngineConfig())
    assert (found.size, found.max_model_len, found.family) == (1000, length, "llama")
    assert found.abilities == ["completion", "tools", "thinking"]
    assert found.need == 1100 + BASE_NBYTES
    short = read_file_facts(str(tmp_path), EngineConfig(max_model_len=64), "none", "none")
    assert (short.max_model_len, short.abilities) == (64, ["completion"])


@pytest.mark.parametrize("config", ["{", "[]", '{"a": ' * 500, "\ufeff{}"])
def test_a_damaged_config_leaves_the_size(tmp_path: Path, config: str) -> None:
    found = read_file_facts(str(folder(tmp_path, config)), EngineConfig())
    assert (found.size, found.max_model_len, found.abilities) == (1000, None, None)


def test_a_gguf_file_has_the_same_in_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_chat_template(TOOLS)
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_file_facts(str(path), EngineConfig())
    assert (found.own_name, found.max_model_len, found.family) == ("q", 4096, "llama")
    assert found.abilities == ["completion", "tools"]
    path.write_bytes(path.read_bytes()[:60])
    assert read_file_facts(str(path), EngineConfig()).abilities is None


def test_what_is_not_here_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_file_facts(str(tmp_path / "no"), EngineConfig())
