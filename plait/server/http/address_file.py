"""The file that says where a server of this machine answers, for `plait health`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.errors import ConfigError

MAX_BYTES = 4096
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # to one of this machine


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`url`: of this machine, with its scheme and port. `host`: the Host to send, "": that of the url."""

    url: str
    host: str = ""


def local_address(scheme: str, host: str, port: int, allowed_hosts: tuple[str, ...] = ()) -> ServerAddress:
    """Where a server that listens on `host` answers on its own machine, with a Host that it accepts."""
    bracketed = f"[{host}]" if ":" in host else host
    return ServerAddress(
        f"{scheme}://{EVERY_ADDRESS.get(host, bracketed)}:{port}", next(iter(allowed_hosts), "")
    )


def write_address(path: str, address: ServerAddress) -> None:
    """Write the file at once as a whole. Raises ConfigError."""
    made = f"{path}.{secrets.token_hex(4)}"
    try:
        handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(address), file)
        os.replace(made, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise ConfigError(
            f"address_file: {path} cannot be written: {error.strerror}; name a file in a folder that the "
            "server may write"
        ) from error


def read_address(path: str) -> ServerAddress:
    """What a server wrote. Raises ConfigError for a file that is not there, or not one of a server."""
    try:
        with Path(path).open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
        return ServerAddress(**{name: str(found[name]) for name in ("url", "host")})
    except FileNotFoundError:
        raise ConfigError(f"address_file: no server that runs has written {path}") from None
    except OSError as error:
        raise ConfigError(f"address_file: {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"address_file: {path} was not written by `plait serve --address-file`") from error


def remove_address(path: str, address: ServerAddress) -> None:
    """Remove the file, unless another server has written it since."""
    with contextlib.suppress(ConfigError, OSError):
        if read_address(path) == address:
            os.unlink(path)
