"""`plait tokenize`, `plait decode`: text to token ids and back, with a model's vocabulary or a named one."""

from __future__ import annotations

import sys

import click

from plait.cli.common.options import TokenIds, common_options, engine_option, model_option, read_stdin
from plait.errors import ConfigError
from plait.text.tokenizers.tokenizer import Tokenizer


@click.command()
@model_option(required=False)
@engine_option("vocab")
@engine_option("plugins")
@click.option("--text", "-t", help="the text; default: stdin")
@click.option("--ids", "only_ids", is_flag=True, help="only the ids, as one line: 1,2,3")
@click.option("--no-special", is_flag=True, help="without the tokens that start or end a text")
@click.option("--control", is_flag=True, help="the text of a control token becomes that token")
@common_options()
def tokenize(
    model: str | None,
    vocab: str | None,
    plugins: tuple[str, ...],
    text: str | None,
    only_ids: bool,
    no_special: bool,
    control: bool,
) -> None:
    """Text to token ids: one line for each token with its id and its text.

    \b
    plait tokenize --vocab cl100k_base --text "Hello, world"
    plait tokenize -m ./model --ids < notes.txt
    """
    text = read_stdin("--text") if text is None else text
    tokenizer = find_tokenizer(model, vocab, plugins)
    ids = tokenizer.encode(text, add_special=not no_special, allow_special=control)
    if only_ids:
        lines = [",".join(map(str, ids))]
    else:
        lines = [f"{i:>8}  {show_token(tokenizer.token_bytes(i))}" for i in ids]
    sys.stdout.write("".join(line + "\n" for line in lines))
    if not only_ids:
        print(f"{len(ids)} tokens, {tokenizer.name}", file=sys.stderr)


def show_token(token: bytes) -> str:
    """A token so that a line break or half a character can be seen: its text in quotes, else its bytes."""
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)


@click.command()
@model_option(required=False)
@engine_option("vocab")
@engine_option("plugins")
@click.option("--ids", type=TokenIds(), help="token ids: 1,2,3; default: from stdin")
@click.option("--skip-special", is_flag=True, help="leave control tokens out")
@common_options()
def decode(
    model: str | None,
    vocab: str | None,
    plugins: tuple[str, ...],
    ids: tuple[int, ...] | None,
    skip_special: bool,
) -> None:
    """Token ids to text.

    \b
    plait decode --vocab llama3 --ids "9906, 11, 1917"
    plait tokenize -m ./model --text "Hello" --ids | plait decode -m ./model
    """
    if ids is None:
        ids = TokenIds().convert(read_stdin("--ids"), None, None)
    tokenizer = find_tokenizer(model, vocab, plugins)
    if unknown := [i for i in ids if tokenizer.is_hole(i)]:
        largest = tokenizer.vocab_size - 1
        raise click.UsageError(
            f"no token has the id {unknown[0]} in {tokenizer.name}; the largest is {largest}"
        )
    sys.stdout.write(tokenizer.decode(ids, skip_special=skip_special) + "\n")


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
