"""Names and addresses of hosts, and which of them a request may name."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from plait.config import ServerConfig
from plait.server.http.errors import HostRefused

_LOCAL_NAMES = frozenset({"localhost", "testserver"})


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(config: ServerConfig, host: str | None) -> None:
    """Raises HostRefused for a Host that this server has no business with: see `--allowed-host`."""
    if host is None or (not config.allowed_host and not is_loopback(config.host)):
        return
    name = host_name(host)
    if name in {host_name(allowed) for allowed in config.allowed_host}:  # written with a port, too
        return
    if is_loopback(config.host) and (
        name in _LOCAL_NAMES or name == config.host.lower() or is_loopback(name)
    ):
        return
    raise HostRefused(
        f"Host is {host[:200]!r}; this server answers to localhost and the names of --allowed-host only",
        "host",
    )
