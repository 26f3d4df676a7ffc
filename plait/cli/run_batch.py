"""`plait run-batch`: many requests from a file, answered into another one, without a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import common_options, engine_options, engine_settings, model_option
from plait.cli.common.progress import LoadingBar
from plait.config import GIB, EngineConfig, ServerConfig
from plait.errors import BadFile, ConfigError

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.server.openai.batch import Counts

EXIT_FAILED = 1
TOLD_EVERY_S = 5.0


@click.command("run-batch", cls=GroupedCommand)
@model_option()
@click.option("--input-file", "-i", required=True, metavar="FILE", help="requests, one a line; -: stdin")
@click.option("--output-file", "-o", required=True, metavar="FILE", help="answers, one a line; -: stdout")
@click.option("--at-once", type=click.IntRange(1), default=64, show_default=True, help="requests in work")
@click.option("--served-model-name", metavar="NAME", help="what the requests call the model")
@click.option("--any-model-name", is_flag=True, help="take whatever the requests call the model")
@engine_options()
@common_options()
@click.pass_context
def run_batch(
    ctx: click.Context,
    /,
    model: str,
    input_file: str,
    output_file: str,
    at_once: int,
    served_model_name: str | None,
    any_model_name: bool,
    **given: object,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    \b
    plait run-batch -i requests.jsonl -o answers.jsonl model.gguf

    A line is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; every POST
    path of the server works. Answers come in the order in which they are done. The exit code is 1 if any
    request failed; its own line has the reason.
    """
    config = EngineConfig(**engine_settings(given))
    if input_file != "-" and Path(input_file).resolve() == Path(output_file).resolve():
        raise ConfigError(f"output-file: {output_file} is the input; name another file")
    server = ServerConfig(
        served_model_name=served_model_name, any_model_name=any_model_name, max_body_bytes=GIB
    )
    with _open_stream(input_file, "rb") as source, _open_stream(output_file, "wb") as target:
        counts = _answer(lambda: _load(model, config), server, (source, target), at_once)
    if counts.failed:
        ctx.exit(EXIT_FAILED)


def _load(model: str, config: EngineConfig) -> Front:
    from plait.worker.client import load_process

    with LoadingBar(f"loading {model}") as bar:
        return load_process(model, config, bar.update)


def _answer(
    load: Callable[[], Front], server: ServerConfig, files: tuple[BinaryIO, BinaryIO], at_once: int
) -> Counts:
    from plait.server.app import create_app
    from plait.server.openai.batch import lines, run

    source, target = files
    front = load()
    try:
        progress = _Progress()
        app = create_app(front, server)
        options: dict[str, Any] = {"at_once": at_once, "on_done": progress, "fault": lambda: front.fault}
        counts = asyncio.run(run(app, lines(source), target.write, **options))
        progress.last(counts)
        return counts
    finally:
        front.close(drain=False)


class _Progress:
    """Reports progress on stderr, now and then."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    def __call__(self, counts: Counts) -> None:
        if time.monotonic() - self._last >= TOLD_EVERY_S:
            self.last(counts)

    def last(self, counts: Counts) -> None:
        self._last = time.monotonic()
        seconds = self._last - self._started
        print(
            f"plait: {counts.done} answered, {counts.failed} of them failed, {seconds:.1f} s", file=sys.stderr
        )


def _open_stream(path: str, mode: str) -> BinaryIO:
    if path == "-":
        stream = sys.stdin if mode == "rb" else sys.stdout
        return open(stream.fileno(), mode, closefd=False)  # type: ignore[return-value]
    if mode == "wb" and not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"output-file: {path}: there is no such directory")
    try:
        return open(path, mode)  # type: ignore[return-value]
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from error
