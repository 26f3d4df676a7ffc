"""The tokenizer that `decode` and `tokenize` work with: a model's, or a vocabulary by its name."""

from __future__ import annotations

import sys

import click

from plait.errors import ConfigError
from plait.text.tokenizers.tokenizer import Tokenizer


def find_tokenizer(model: str | None, vocab: str | None, plugins: tuple[str, ...] = ()) -> Tokenizer:
    """From the model's files, which `plugins` may be needed to read, or from `vocab` alone.

    Raises ConfigError, and what opening a model does.
    """
    if model is None:
        from plait.text.load import load_tokenizer

        if vocab is None:
            raise click.UsageError("name a vocabulary with --vocab, or a model with --model")
        if plugins:
            raise click.UsageError("--plugin helps to read a model; name one with --model")
        tokenizer: Tokenizer | None = load_tokenizer(vocab=vocab)
    else:
        from plait.config import EngineConfig
        from plait.loading.open_model import open_model

        tokenizer = open_model(model, EngineConfig(vocab=vocab, plugins=plugins)).tokenizer()
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer that Plait can find; name a vocabulary with --vocab")
    return tokenizer


def read_stdin(what: str) -> str:
    """What is piped in. Raises UsageError on a terminal, where a read would wait without a word."""
    if sys.stdin.isatty():
        raise click.UsageError(f"there is nothing to do: give {what}, or pipe it in")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8: {error}") from error
