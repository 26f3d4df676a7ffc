"""Names and addresses of hosts."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


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
