"""`plait health`: whether a running server answers, for the health check of a container."""

from __future__ import annotations

import click
from click.core import ParameterSource

from plait.cli.common.options import common_options, url_option
from plait.cli.common.server_client import ServerClient, ServerError
from plait.errors import ConfigError
from plait.server.http.address_file import read_address


@click.command()
@url_option()
@click.option(
    "--address-file",
    metavar="FILE",
    envvar="PLAIT_ADDRESS_FILE",
    show_envvar=True,
    help="the file in which `plait serve --address-file` has its address; --url wins over the environment's",
)
@click.option("--ready", is_flag=True, help="whether it takes requests (/ready), not only lives (/live)")
@click.option(
    "--timeout-s", type=click.FloatRange(0, 600, min_open=True), default=4.0, show_default=True,
    help="seconds that the server gets to answer",
)  # fmt: skip
@common_options()
@click.pass_context
def health(ctx: click.Context, url: str, address_file: str | None, ready: bool, timeout_s: float) -> None:
    """Whether a running server answers; exit code 0 if it does, and 1 if not.

    With an address file it follows the server's port, TLS and hosts. The certificate is not checked then: it
    names the server's clients' address, and this command sends no key.

    \b
    plait health
    plait health --ready --url https://models.example.org
    plait serve ./model --port 0 --address-file /run/plait/address
    plait health --address-file /run/plait/address
    """
    client = make_client(ctx, url, address_file, timeout_s)
    path = "/ready" if ready else "/live"
    status, body = client.request("GET", path)
    word = str(body.get("status", "")) if isinstance(body, dict) else ""
    text = "".join(c if c.isprintable() else "?" for c in word)[:100]
    if status != 200:
        raise ServerError(f"{client.url}{path} answers {status}" + (f", {text}" if text else ""))
    print(f"{client.url}{path}: {text or 'ok'}")


def make_client(ctx: click.Context, url: str, address_file: str | None, timeout_s: float) -> ServerClient:
    """The server that is named on the command line, else by the environment. Raises ConfigError."""
    typed = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if {"url", "address_file"} <= {*typed}:
        raise ConfigError("url and address_file: each names a server; give one of them")
    if address_file is None or "url" in typed:
        return ServerClient(url, read_s=timeout_s)
    found = read_address(address_file)
    return ServerClient(found.url, read_s=timeout_s, host=found.host, checks_certificate=False)
