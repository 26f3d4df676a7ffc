"""The log: a line for each request and each event, text or JSON. Never a prompt, a reply or a key.

What clients send reaches it escaped: no control character of theirs makes a line or moves a cursor.

    any thread ──emit──▶ lines (bounded) ──one thread──▶ stderr or a file
                 full: dropped and counted

A pipe that is not read, a slow disk or a full one blocks that one thread, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from traceback import format_exception

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.config import ServerConfig
from plait.errors import ConfigError

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
        return line + "".join("\n" + escape_controls(part) for part in _trace(record).splitlines())


class JsonFormat(logging.Formatter):
    """One object: `time`, `level`, `logger`, `message` or a request's fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "fields", None) or {}),
        }
        if trace := _trace(record):
            said["exception"] = trace
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


def _trace(record: logging.LogRecord) -> str:
    """The traceback of a record; one of the engine's process comes as text."""
    return record.exc_text or ("".join(format_exception(record.exc_info[1])) if record.exc_info else "")


def escape_controls(text: str) -> str:
    """The text with each control character as its escape."""
    return text.translate(_CONTROLS)


def shows_requests(route: str, *, is_quiet: bool = False) -> bool:
    """Whether a request of this route has a line in the log: quiet routes have one at `debug` only."""
    return access.isEnabledFor(_level(route, is_quiet))


def log_request(fields: Mapping[str, object], route: str, *, is_quiet: bool = False) -> None:
    """Write the line of one request; fields without a value are left out."""
    level = _level(route, is_quiet)
    if access.isEnabledFor(level):
        shown = {name: value for name, value in fields.items() if value not in (None, "", ())}
        access.log(level, "request", extra={"fields": shown})


def _level(route: str, is_quiet: bool) -> int:
    return logging.DEBUG if is_quiet or route in QUIET_ROUTES else logging.INFO


def _pairs(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _when(record: logging.LogRecord) -> str:
    """The time of a record: UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


STDERR = 2
QUEUE_BYTES = 4 << 20  # of lines that wait; some ten thousand
LINE_OVERHEAD = 64  # a short line takes memory, too
BATCH_BYTES = 64 * 1024  # in one call of the system
FLUSH_S = 2.0  # at the end, for a reader that is slow
RETRY_MS = 1000


class LogWriter(logging.Handler):
    """Writes formatted records to stderr, or appends them to the file `path`. Safe from any thread.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.num_dropped = 0
        self._fd = _open_log(path)
        self._next_fd: int | None = None  # set by `reopen`; the thread changes over between two writes
        self._lines: deque[tuple[bytes, int]] = deque()  # each with the dropped lines that it reports
        self._size = self._num_unreported = 0
        self._is_writing = self._is_stuck = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="plait-log", daemon=True).start()

    def reopen(self, path: str | None) -> None:
        """Write there from the next line on; a file that was renamed or removed is made again.

        Raises ConfigError, and goes on writing where it did.
        """
        fd = _open_log(path)
        with self._changed:
            unused, self._next_fd = self._next_fd, fd
        if unused is not None:
            _close(unused)

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            if self._size >= QUEUE_BYTES:
                self._drop(1)
                return
        try:
            text = self.format(record)
        except Exception as error:  # a caller's fault, which must be seen and must not end the caller
            text = f"{record.levelname} a record of {record.name} cannot be formatted: {error!r}"
        with self._changed:
            count, self._num_unreported = self._num_unreported, 0
            if count:
                text = f"{self._report(count)}\n{text}"
            line = text.encode(errors="backslashreplace") + b"\n"
            self._lines.append((line, count))
            self._size += len(line) + LINE_OVERHEAD
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, `FLUSH_S` seconds at most, and once only for a stuck reader."""
        with self._changed:
            if not self._is_stuck:
                self._is_stuck = not self._changed.wait_for(self._is_idle, FLUSH_S)

    def _is_idle(self) -> bool:
        return not self._lines and not self._is_writing

    def _report(self, count: int) -> str:
        text = f"the log was not written in time: {count} lines were dropped here"
        return self.format(logging.LogRecord("plait.server", logging.WARNING, "", 0, text, (), None))

    def _drop(self, count: int) -> None:
        self.num_dropped += count
        self._num_unreported += count

    def _run(self) -> None:
        start = b""  # a line break, where the disk was full in the middle of a line
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                self._is_writing = True
                batch = self._take()
                fd = self._current_fd()
            data = start + b"".join(line for line, _ in batch)
            left = _write(fd, data)
            if len(left) < len(data):
                start = b"" if data[: len(data) - len(left)].endswith(b"\n") else b"\n"
            lost: list[int] = []  # what the lines that were not written whole have reported
            while batch and left:
                line, count = batch.pop()
                lost.append(count)
                left = left[: -len(line)]
            with self._changed:
                self._is_stuck = False
                self._drop(len(lost))
                self._num_unreported += sum(lost)

    def _take(self) -> list[tuple[bytes, int]]:
        batch: list[tuple[bytes, int]] = []
        size = 0
        while self._lines and size < BATCH_BYTES:
            batch.append(self._lines.popleft())
            size += len(batch[-1][0])
            self._size -= len(batch[-1][0]) + LINE_OVERHEAD
        return batch

    def _current_fd(self) -> int:
        if self._next_fd is not None:
            _close(self._fd)
            self._fd, self._next_fd = self._next_fd, None
        return self._fd


def _write(fd: int, data: bytes) -> bytes:
    """Write it, and wait for a pipe that is full. Returns what could not be written."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process may have made the pipe we share so
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(RETRY_MS)
        except OSError:  # the pipe has no reader, or the disk no space
            time.sleep(0.01)
            break
    return bytes(left)


def _open_log(path: str | None) -> int:
    if path is None:
        return STDERR
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO must not hold us
    try:
        fd = os.open(path, flags, 0o640)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"log_file: {path} cannot be opened: {why}") from error
    if _ends_mid_line(path):
        _write(fd, b"\n")
    return fd


def _ends_mid_line(path: str) -> bool:
    """Whether the last line of a file was not finished, as when its writer was killed."""
    with suppress(OSError):
        if os.path.isfile(path) and os.path.getsize(path):
            with open(path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
    return False


def _close(fd: int) -> None:
    if fd != STDERR:
        os.close(fd)


class DroppedLines(Collector):
    """A metric: the lines that a log could not take."""

    def __init__(self, log: LogWriter | None) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        text = "Lines of the log that were dropped: it was not read, or could not be written."
        yield CounterMetricFamily("plait_log_lines_dropped", text, self._log.num_dropped if self._log else 0)
