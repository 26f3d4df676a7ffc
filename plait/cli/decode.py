"""`plait decode`: token ids to text."""

from __future__ import annotations

import sys

import click

from plait.cli.common.options import TokenIds, common_options, engine_option, model_option
from plait.cli.common.vocabulary import find_tokenizer, read_stdin


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
