"""What the files of a model say before it is loaded: its size, context and abilities. No weight is read.

Nothing here decides anything for the engine. What cannot be read here is not known until the model is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.choose_weights import PARAMS
from plait.checkpoint.find_files import ModelFiles, find_model, read_json
from plait.checkpoint.readers.gguf_metadata import is_own, own_config, read_metadata
from plait.config import EngineConfig
from plait.errors import PlaitError
from plait.families.config.mistral_params import read_params
from plait.text.load import template_sources
from plait.text.output.formats import tool_format
from plait.text.output.reasoning import reasoning_format

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
BASE_NBYTES = 256 << 20  # of an engine's process, its step and the first sequences
SHARE = 1.1  # of weights, packed: see docs/quantized.md


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """`own_name`: what the model is called without a name of ours. `size`: bytes of its weight files."""

    own_name: str
    size: int
    max_model_len: int | None = None
    abilities: Sequence[str] | None = None
    family: str = ""
    template: str = ""

    @property
    def need(self) -> int:
        """Bytes that its engine will take, by estimation."""
        return int(self.size * SHARE) + BASE_NBYTES


def read_file_facts(
    source: str, engine: EngineConfig, tools: str | None = None, reasoning: str | None = None
) -> FileFacts:
    """The facts of what is on this disk; nothing is fetched. `tools`, `reasoning`: names of formats.

    Raises ConfigError, CheckpointError and UnsupportedFormat for a model that cannot be found.
    """
    files = find_model(source, offline=True)
    size = sum(path.stat().st_size for path in files.weights)
    found = FileFacts(own_name=files.name, size=size)
    # A file that is damaged is the engine's to refuse, with all of its words.
    with contextlib.suppress(PlaitError, OSError, ValueError, RecursionError):
        config, metadata = _config(files)
        template = _template(files, metadata, engine)
        found = FileFacts(
            own_name=files.name,
            size=size,
            max_model_len=_length(config, engine),
            abilities=_abilities(template, tools, reasoning),
            family=str(config.get("model_type") or "")[:64],
            template=template,
        )
    return found


def _config(files: ModelFiles) -> tuple[Mapping[str, object], Mapping[str, object] | None]:
    """The config, and the metadata of a GGUF file."""
    if files.kind != "gguf":
        raw = read_json(files.config, files.config.name) if files.config else {}
        return (read_params(raw) if files.config and files.config.name == PARAMS else raw), None
    metadata = read_metadata(files.weights[0])
    if is_own(metadata):
        return own_config(metadata) or {}, metadata
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.context_length")
    return {"model_type": architecture, "max_position_embeddings": length}, metadata


def _template(files: ModelFiles, metadata: Mapping[str, object] | None, engine: EngineConfig) -> str:
    if engine.chat_template is not None:
        path = Path(engine.chat_template)
        return path.read_text("utf-8") if path.is_file() else ""
    own = metadata is not None and "tokenizer.ggml.model" in metadata
    return "\n".join(template_sources(None if own else files.directory, metadata).values())


def _length(config: Mapping[str, object], engine: EngineConfig) -> int | None:
    for part in _parts(config):
        for name in _LENGTHS:
            value = part.get(name)
            if type(value) is int and value > 0:
                return min(value, engine.max_model_len or value)
    return engine.max_model_len


def _parts(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A config, and those of text models in it."""
    yield config
    for name in _NESTED:
        if isinstance(inner := config.get(name), dict):
            yield from _parts(inner)


def _abilities(template: str, tools: str | None, reasoning: str | None) -> Sequence[str]:
    """As the model's reply format will find them; control tokens of a vocabulary are not looked at."""
    found = ["completion"]
    if template and tool_format(template, (), tools) is not None:
        found.append("tools")
    if template and reasoning_format(template, (), reasoning) is not None:
        found.append("thinking")
    return found
