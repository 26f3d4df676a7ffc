"""`plait generate`: a text goes on, to stdout as it is written; how fast it was goes to stderr."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    TokenIds,
    adapter_option,
    choose_adapter,
    common_options,
    engine_options,
    engine_settings,
    model_option,
    read_stdin,
    sampling_options,
    sampling_params,
)
from plait.cli.common.progress import Clock, LoadingBar
from plait.config import EngineConfig
from plait.errors import check_unicode
from plait.loading.torch_preload import finish_torch

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.llm.llm import LLM

DEFAULT_MAX_TOKENS = 100


@click.command(cls=GroupedCommand)
@model_option()
@click.option("--prompt", "-p", help="the text to go on from; - (or nothing, in a pipe) reads stdin")
@click.option("--ids", type=TokenIds(), help="the prompt as token ids: 1,2,3; for models without a tokenizer")
@sampling_options(max_tokens=DEFAULT_MAX_TOKENS)
@engine_options()
@adapter_option()
@click.option("--quiet", "-q", is_flag=True, help="nothing on stderr but errors")
@common_options()
def generate(
    model: str,
    prompt: str | None,
    ids: tuple[int, ...] | None,
    adapter: str | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Continue a text, streamed as it is written.

    \b
    plait generate --model ./model --prompt "The sea is" --temperature 0
    cat notes.txt | plait generate --model model.gguf --max-tokens 200
    """
    params, settings = sampling_params(given), engine_settings(given)
    chosen = choose_adapter(adapter, settings["lora"])
    if ids is not None and prompt is not None:
        raise click.UsageError("--prompt and --ids are both the prompt; give one of them")
    text = ids if ids is not None else prompt
    if text is None or text == "-":
        text = read_stdin("--prompt or --ids")
        if not text:
            raise click.UsageError("stdin is empty: give --prompt or --ids, or pipe a text in")
    check_unicode("--prompt", text)
    llm = load(model, settings, quiet=quiet)
    if not quiet and "compiled" in llm.step_kind:
        later = f"compiles them again: {llm.unkept}" if llm.unkept else "loads them"
        print(f"step: {llm.step_kind}; the next run {later}", file=sys.stderr)
    from plait.engine.admission import ServiceOptions

    try:
        request = llm.front.prepare(text, params, terms=ServiceOptions(adapter=chosen))
        clock = Clock(len(request.prompt_token_ids))
        write(llm.front.submit(request), clock, as_ids=llm.front.tokenizer is None)
        if not quiet:
            print(clock, file=sys.stderr)
            if note := clock.context_note(llm.front.max_model_len):
                print(note, file=sys.stderr)
    finally:
        llm.close()


def load(model: str, settings: dict[str, Any], *, quiet: bool = False) -> LLM:
    """The model, loaded, with a progress bar on a terminal."""
    gc.disable()  # looking for cycles in what libraries define takes a sixth of the time, and finds none
    try:
        from plait.llm.llm import LLM
        from plait.loading.image.lookup import has_image

        if not has_image(model, EngineConfig(**settings)):
            finish_torch()

        with LoadingBar(f"loading {model}", is_quiet=quiet) as loading:
            return LLM(model, on_progress=None if quiet else loading.update, **settings)
    finally:
        gc.freeze()  # what is there now stays: no collection looks at it again
        gc.enable()


def write(deltas: Iterable[Delta], clock: Clock, *, as_ids: bool = False) -> str:
    """Stream to stdout and return the whole text; token ids where there is no tokenizer."""
    parts: list[str] = []
    for delta in deltas:
        if delta.error:
            raise delta.error
        clock.tokens(delta.num_tokens)
        piece = "".join(f"{token_id} " for token_id in delta.token_ids) if as_ids else delta.text
        if piece:
            parts.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    text = "".join(parts)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return text
