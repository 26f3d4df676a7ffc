"""The log: a line for each request and each event, text or JSON. Never a prompt, a reply or a key.

What clients send reaches it escaped: no control character of theirs makes a line or moves a cursor.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from plait.config import ServerConfig
from plait.server.gateway.log_writer import LogWriter

access = logging.getLogger("plait.access")
_OTHERS = (("", "WARNING"), ("uvicorn", "WARNING"), ("opentelemetry", "ERROR"))  # "": all others
QUIET_ROUTES = frozenset({"/health", "/ready", "/live", "/metrics", "/", "/page"})  # polled every second
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without space, quotes, = and backslash
_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0))} | {
    i: f"\\u{i:04x}" for i in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


class TextFormat(logging.Formatter):
    """`time level message`, or `time level key=value …`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        said = _pairs(fields) if fields else escape_controls(record.getMessage())
        line = f"{_when(record)} {record.levelname} {said}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join("\n" + escape_controls(part) for part in trace.splitlines())
        return line


class JsonFormat(logging.Formatter):
    """One object: `time`, `level`, `logger`, `message` or a request's fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "fields", None) or {}),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=True, default=str)


def start_log(config: ServerConfig) -> LogWriter:
    """Write all log records of this process from now on. Raises ConfigError for its file."""
    writer = LogWriter(config.log_file)
    logging.captureWarnings(True)
    follow(config, writer)
    return writer


def follow(config: ServerConfig, writer: LogWriter) -> None:
    """Log our own messages from `log_level` on, and others' warnings, in the requested format."""
    writer.setFormatter(JsonFormat() if config.log_format == "json" else TextFormat())
    for name, level in (*_OTHERS, ("plait", config.log_level.upper())):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.propagate = False
        log.handlers = [writer]


def escape_controls(text: str) -> str:
    """The text with each control character as its escape."""
    return text.translate(_CONTROLS)


def shows_requests(route: str, *, is_quiet: bool = False) -> bool:
    """Whether a request of this route has a line in the log: quiet routes have one at `debug` only."""
    return access.isEnabledFor(_level(route, is_quiet))


def log_request(fields: Mapping[str, Any], route: str, *, is_quiet: bool = False) -> None:
    """Write the line of one request; fields without a value are left out."""
    level = _level(route, is_quiet)
    if access.isEnabledFor(level):
        shown = {name: value for name, value in fields.items() if value not in (None, "", ())}
        access.log(level, "request", extra={"fields": shown})


def _level(route: str, is_quiet: bool) -> int:
    return logging.DEBUG if is_quiet or route in QUIET_ROUTES else logging.INFO


def _pairs(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _when(record: logging.LogRecord) -> str:
    """The time of a record: UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
