"""`plait tokenize`: text to token ids."""

from __future__ import annotations

import sys

import click

from plait.cli.common.options import common_options, engine_option, model_option
from plait.cli.common.vocabulary import find_tokenizer, read_stdin


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
