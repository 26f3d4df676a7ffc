"""`plait run`: talk with a model of a running server, or of one that is started for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from plait.cli.chat import talk
from plait.cli.chat_session import ChatSession
from plait.cli.common.help import GroupedCommand
from plait.cli.common.log_file import last_lines, prepare_log
from plait.cli.common.options import (
    SAMPLING_HELP,
    common_options,
    sampling_options,
    sampling_params,
    server_options,
)
from plait.cli.common.progress import Status
from plait.cli.common.server_client import ServerClient, ServerError, StreamedReply
from plait.errors import CapacityError, CheckpointError, ConfigError, PlaitError
from plait.request import SamplingParams

LOCAL = ("127.0.0.1", "localhost", "::1")
LOOK_S = 0.1  # between two looks at a server that is loading
END_S = 40.0  # for a server to end in order
# What a server that ended by itself reports by its exit code; `plait run` ends with the same one.
ENDED: dict[int, type[PlaitError]] = {
    kind.exit_code: kind for kind in (ConfigError, CheckpointError, CapacityError)
}


class ServedModel:
    """A model of a server. `server`: the process to end with the chat, if it was started for it."""

    def __init__(
        self, client: ServerClient, name: str, server: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._client, self._server, self.name = client, server, name
        self.max_model_len = client.models()[name]

    def ask(self, messages: list[dict[str, str]], params: SamplingParams) -> StreamedReply:
        return self._client.chat(self.name, messages, request_fields(params))

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            end_server(self._server)


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="MODEL")
@click.argument("serve_options", metavar="[-- OPTIONS OF SERVE]", nargs=-1, type=click.UNPROCESSED)
@click.option("--system", help="the system message")
@click.option("--prompt", "-p", help="a message to answer, and no conversation")
@sampling_options(max_tokens=None)
@server_options()
@click.option("--keep", is_flag=True, help="leave a server that was started running when the chat ends")
@click.option("--quiet", "-q", is_flag=True, help="replies only: no greeting and no speed")
@click.option(
    "--history/--no-history", default=True, help="keep typed lines for the arrow keys of later chats"
)
@common_options()
def run(
    model: str,
    serve_options: Sequence[str],
    system: str | None,
    prompt: str | None,
    url: str,
    api_key: str | None,
    keep: bool,
    quiet: bool,
    history: bool,
    **given: object,
) -> None:
    """Talk with a model: fetch it if it is not here, serve it if no server does, and chat.

    A server at --url that has the model is used as it is. Otherwise one is started, with the options after
    `--`; it answers other programs and shows its page meanwhile, and ends with the chat (but for --keep).
    Its log is what `plait logs` shows.

    \b
    plait run org/name:Q4_K_M
    plait run ./model --prompt "Why is the sea salt?"
    plait run ./model --keep -- --max-model-len 8192
    """
    if serve_options and not serve_options[0].startswith("-"):
        raise click.UsageError(f"Got unexpected extra argument ({serve_options[0]})")
    params = sampling_params(given)

    def open_model(name: str) -> ServedModel:
        return find_model(name, url, api_key, serve_options, keep=keep, quiet=quiet)

    session = ChatSession(open_model, params, system, quiet=quiet)
    session.open_model(model)
    if prompt is None:
        talk(session, quiet=quiet, history=history)
        return
    try:
        session.reply(prompt)
    finally:
        session.close()


def find_model(
    name: str, url: str, api_key: str | None, serve_options: Sequence[str], *, keep: bool, quiet: bool
) -> ServedModel:
    """The model at `url`, or of a server that is started. Raises ConfigError, ServerError."""
    client, found = ServerClient(url, api_key), None
    try:
        found = match_name(name, client.models())
    except ServerError as error:
        if client.host not in LOCAL:
            raise
        is_reached = not isinstance(error.__cause__, OSError)
        if is_reached:
            raise
        port = client.port
    else:
        port = 0  # another server has it
    if found is not None:
        if serve_options:
            raise ConfigError(
                f"{' '.join(serve_options)}: a server at {client.url} has {found} already, and keeps its "
                "options; leave them out, or name another --url"
            )
        return ServedModel(client, found)
    if client.host not in LOCAL:
        raise ConfigError(
            f"{name}: the server at {client.url} has no such model; `plait run` starts local ones"
        )
    return start_server(name, port or free_port(), api_key, serve_options, keep=keep, quiet=quiet)


def match_name(name: str, served: dict[str, int]) -> str | None:
    """The served model that is meant: by its name, or by the last part of a path or Hub name."""
    last = Path(name).name
    for wanted in (name, last, last.partition(":")[0], Path(last).stem):
        if wanted in served:
            return wanted
    return None


def start_server(
    name: str, port: int, api_key: str | None, serve_options: Sequence[str], *, keep: bool, quiet: bool
) -> ServedModel:
    """Start `plait serve` and wait until it answers. Raises what its exit code means (`ENDED`)."""
    log = prepare_log()
    environment = {**os.environ, **({"PLAIT_API_KEY": api_key} if api_key else {})}
    command = [sys.executable, "-P", "-m", "plait.cli.main", "serve", "--model", name, "--port", str(port)]
    with log.open("ab") as file:
        begin = file.tell()
        server = subprocess.Popen(
            [*command, *serve_options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C stops a reply, not the server
        )
    client = ServerClient(f"http://127.0.0.1:{port}", (api_key or "").rpartition(":")[2])
    try:
        with Status(f"starting a server for {name}", is_quiet=quiet) as status:
            wait_until_ready(client, server, status, (log, begin))
        (served, *_) = client.models()
        model = ServedModel(client, served, None if keep else server)
    except BaseException:
        end_server(server)
        raise
    if not quiet:
        kept = f"; it stays until `kill {server.pid}`" if keep else ""
        print(f"{served} is served at {client.url}{kept}", file=sys.stderr)
    return model


def wait_until_ready(
    client: ServerClient, server: subprocess.Popen[bytes], status: Status, log: tuple[Path, int]
) -> None:
    """Return when the model is loaded. Raises an error with its exit code when the process ends before.

    `log`: its file, and the byte at which the server's lines begin.
    """
    while True:
        code = server.poll()
        if code is not None:
            told = last_lines(log[0], 1, begin=log[1])
            why = told[0].removeprefix("plait: ") if told else f"it ended with exit code {code}"
            kind = ENDED.get(code, ServerError)
            raise kind(f"the server did not start: {why} (`plait logs` shows more)")
        try:
            answered, health = client.request("GET", "/health")
        except ServerError:
            answered, health = 0, None
        if answered == 200:
            return
        progress = health.get("progress") if isinstance(health, dict) else None
        if isinstance(progress, dict):
            done, total = progress.get("done"), progress.get("total")
            status.say(f"{progress.get('text')}: {done} of {total}" if total else str(progress.get("text")))
        time.sleep(LOOK_S)


def end_server(server: subprocess.Popen[bytes]) -> None:
    """End it in order; one that does not end is killed."""
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def free_port() -> int:
    """A port of the loopback address that no one listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def request_fields(params: SamplingParams) -> dict[str, object]:
    """The fields of a request for what differs from the defaults: the rest is the model's choice."""
    plain = SamplingParams()
    given = ((name, getattr(params, name)) for name in SAMPLING_HELP)
    return {name: value for name, value in given if value != getattr(plain, name)}
