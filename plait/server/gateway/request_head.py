"""The path and the host of a request, before anything else of it is looked at."""

from __future__ import annotations

from plait.config import ServerConfig
from plait.server.http.errors import HostRefused
from plait.server.http.hosts import host_name, is_loopback

_LOCAL_NAMES = frozenset({"localhost", "testserver"})


def one_spelling(path: str) -> str:
    """A path without doubled and trailing slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def check_host(config: ServerConfig, host: str | None) -> None:
    """Raises HostRefused for a Host that this server has no business with: see `--allowed-host`."""
    if host is None or (not config.allowed_host and not is_loopback(config.host)):
        return
    name = host_name(host)
    if name in {allowed.lower() for allowed in config.allowed_host}:
        return
    if is_loopback(config.host) and (
        name in _LOCAL_NAMES or name == config.host.lower() or is_loopback(name)
    ):
        return
    raise HostRefused(
        f"Host is {host[:200]!r}; this server answers to localhost and the names of --allowed-host only",
        "host",
    )
