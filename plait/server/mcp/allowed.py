"""The operator's list of MCP servers. No request reaches an address that is not on it.

Addresses are read here alone, once, at startup: a client's `server_url` is only compared with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.mcp.errors import ALLOW, McpNotAllowed

LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
MAX_URL = 2048
PORTS = {"http": 80, "https": 443}
_VISIBLE = re.compile(r"[\x21-\x7e]+")


class McpServer(Struct, frozen=True):
    """One server. `target`: the path and the query of its URL; `token`: sent as a bearer, "": none is."""

    label: str
    is_secure: bool
    host: str
    port: int
    target: str
    token: str = ""

    @property
    def place(self) -> tuple[bool, str, int, str]:
        """What makes two URLs the same."""
        return self.is_secure, self.host, self.port, self.target

    @property
    def authority(self) -> str:
        """The value of Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


class McpServers:
    """The servers that may be used, by label. `timeout_s`: how long one answer may take."""

    def __init__(self, servers: Iterable[McpServer] = (), timeout_s: float = 60.0) -> None:
        self._servers = {server.label: server for server in servers}
        self.timeout_s = timeout_s

    @classmethod
    def of(cls, config: ServerConfig) -> McpServers:
        """Read the options. Raises ConfigError."""
        tokens = dict(_pair(text, "mcp_token", "TOKEN") for text in config.mcp_token)
        found: dict[str, McpServer] = {}
        for text in config.mcp_server:
            label, url = _pair(text, "mcp_server", "URL")
            if label in found:
                raise ConfigError(f"mcp_server: {label} is given twice; each label names one server")
            try:
                found[label] = parse_url(label, url, tokens.pop(label, ""))
            except ValueError as error:
                raise ConfigError(f"mcp_server: the URL of {label}: {error}") from None
        if tokens:
            raise ConfigError(f"mcp_token: {min(tokens)} is the label of no mcp_server")
        return cls(found.values(), config.mcp_timeout_s)

    @property
    def labels(self) -> Sequence[str]:
        return [*self._servers]

    def by_label(self, label: str, at: str) -> McpServer:
        """Raises McpNotAllowed, naming the field `at`."""
        if label not in self._servers:
            raise McpNotAllowed(f"{at}: {label!r:.80} is no MCP server of this server; {self._hint()}", at)
        return self._servers[label]

    def by_url(self, url: str, at: str) -> McpServer:
        """Raises McpNotAllowed, naming the field `at`."""
        try:
            place = parse_url("", url).place
        except ValueError as error:
            raise McpNotAllowed(f"{at}: {url!r:.80}: {error}; {self._hint()}", at) from None
        for server in self._servers.values():
            if server.place == place:
                return server
        raise McpNotAllowed(f"{at}: {url!r:.80} may not be called; {self._hint()}", at)

    def _hint(self) -> str:
        if not self._servers:
            return f"there is none; {ALLOW}"
        return f"those that may be used are {', '.join(self._servers)}; {ALLOW}"


def _pair(text: str, name: str, what: str) -> tuple[str, str]:
    label, is_there, value = text.partition("=")
    if not is_there or not LABEL.fullmatch(label):
        # A text without a label may be a token, which no log may have.
        raise ConfigError(
            f"{name}: it is not LABEL={what}; a label is a letter, then at most 63 letters, digits, _ and -"
        )
    if not _VISIBLE.fullmatch(value):
        raise ConfigError(f"{name}: the {what} of {label} is empty, or has spaces or other such characters")
    return label, value


def parse_url(label: str, url: str, token: str = "") -> McpServer:
    """The server at a URL. Raises ValueError that says what is wrong with it."""
    if len(url) > MAX_URL or not _VISIBLE.fullmatch(url):
        raise ValueError(f"a URL has at most {MAX_URL} visible ASCII characters")
    found = urlsplit(url)
    if found.scheme not in PORTS or not found.hostname:
        raise ValueError("it is not http://… or https://…")
    if "@" in found.netloc or found.fragment or "\\" in url:
        raise ValueError("it must have no user, password, fragment or backslash")
    target = found.path or "/"
    if found.query:
        target += f"?{found.query}"
    is_secure = found.scheme == "https"
    return McpServer(label, is_secure, found.hostname.lower(), _port(found), target, token)


def _port(found: SplitResult) -> int:
    try:
        port = found.port
    except ValueError:
        raise ValueError("its port is no number from 1 to 65535") from None
    if port == 0:
        raise ValueError("its port is no number from 1 to 65535")
    return port or PORTS[found.scheme]
