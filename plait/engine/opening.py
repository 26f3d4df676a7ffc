"""A model's files, read and understood, and its weights: what stands before there is an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.files import ModelFiles, find_model, read_json
from plait.checkpoint.gguf import GgufFile
from plait.checkpoint.safetensors import SafetensorsFiles
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.front import Language
from plait.errors import BadFile, InvalidField
from plait.families.resolve import resolve
from plait.families.resolved import Resolved
from plait.model.decoder import Decoder
from plait.quant.weight import as_tensor
from plait.request import SamplingParams
from plait.text.load import load_chat_template, load_generation_config, load_tokenizer
from plait.text.tokenizer import Tokenizer

HELD_NBYTES = 64 << 20  # of a file's pages, while its weights are packed one after the other
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's headers, read and understood; no weight has been touched."""

    files: ModelFiles
    checkpoint: GgufFile | SafetensorsFiles
    metadata: Mapping[str, Any] | None  # of a GGUF file
    resolved: Resolved
    config: EngineConfig

    @property
    def is_oxidizr(self) -> bool:
        return self.resolved.family == "oxidizr"

    @property
    def text_directory(self) -> Path | None:
        """Where files of text lie. A GGUF file brings its own: what lies beside it may be another model's."""
        return None if self.metadata and "tokenizer.ggml.model" in self.metadata else self.files.directory

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(self.checkpoint.nbytes(name) for name in self.checkpoint.names())

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that belongs to it, if one can be found."""
        return load_tokenizer(
            directory=self.text_directory,
            metadata=self.metadata,
            vocab=self.config.vocab,
            vocab_size=self.resolved.spec.vocab_size,
            config=self.resolved.config,
            oxidizr=self.is_oxidizr,
        )

    def language(self) -> Language:
        """Its whole text side."""
        tokenizer = self.tokenizer()
        generation_config = load_generation_config(self.text_directory)
        try:
            SamplingParams().resolved(generation_config)
        except InvalidField as error:
            raise BadFile(f"generation_config.json of {self.files.name}: {error}") from error
        template = load_chat_template(
            directory=self.text_directory,
            metadata=self.metadata,
            option=self.config.chat_template,
            tokenizer=tokenizer,
            oxidizr=self.is_oxidizr,
        )
        stops = tokenizer.eos_token_ids if tokenizer else _listed(generation_config.get("eos_token_id"))
        return Language(
            tokenizer,
            template,
            generation_config,
            stops | (template.stop_token_ids if template else frozenset()),
        )


def open_model(model: str, config: EngineConfig) -> Opened:
    """Find a model's files and understand their headers.

    Raises ConfigError, CheckpointError or UnsupportedModel.
    """
    files = find_model(model)
    raw = read_json(files.config, "config.json") if files.config else None
    if files.kind == "gguf":
        gguf = GgufFile(files.weights[0])
        return Opened(files, gguf, gguf.metadata, _resolve(gguf, None, gguf.metadata, config), config)
    tensors = SafetensorsFiles(*files.weights, index=files.index)
    return Opened(files, tensors, None, _resolve(tensors, raw, None, config), config)


def load_decoder(opened: Opened, target: Target, report: Progress) -> Decoder:
    """The model with all its weights, packed for `target`. Raises CheckpointError."""
    total, done, held = opened.nbytes, 0, 0

    def on_read(_: str, nbytes: int) -> None:
        nonlocal done, held
        done, held = done + nbytes, held + nbytes
        report("loading weights", min(done, total), total)
        if held > HELD_NBYTES:  # packed by now: the file's pages beside them would double the memory
            opened.checkpoint.release()
            held = 0

    target.on_read = on_read
    weights = Weights(opened.checkpoint, opened.resolved.names, target)
    decoder = Decoder(opened.resolved.spec, weights)
    weights.check_all_used()
    opened.checkpoint.release()
    return decoder


def stored_dtypes(opened: Opened) -> list[str]:
    """The format of every tensor of the checkpoint."""
    return [opened.checkpoint.format_of(name) for name in opened.checkpoint.names()]


def kv_dtype(config: EngineConfig, stored: Sequence[str], dtype: torch.dtype) -> str:
    """What keys and values are kept in: the name of a dtype, or "model"."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    exact = config.precise or dtype != torch.float32 or not any(name != "float32" for name in stored)
    return "model" if exact else "bfloat16"


def banned_ids(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids without a token: a model can have more rows than its tokenizer has words."""
    return tokenizer.holes(vocab_size) if tokenizer else ()


def _resolve(
    checkpoint: GgufFile | SafetensorsFiles,
    raw: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    config: EngineConfig,
) -> Resolved:
    def read(name: str) -> Tensor:
        return as_tensor(checkpoint.read(name))

    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    return resolve(
        raw,
        shapes,
        gguf=metadata,
        overrides=config.set,
        read=read,
        ssm_mode=config.ssm_mode,
        a_source=config.a_source,
    )


def _listed(value: int | list[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or [])
