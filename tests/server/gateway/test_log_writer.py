"""The log writer: a log that is not read, cannot be written or was renamed does not block the server."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.server.gateway import access_log
from plait.server.gateway.access_log import LogWriter
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, wait_until

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from plait.config import ServerConfig
from plait.server.gateway import access_log
from plait.server.gateway.access_log import start_log
from plait.server.run import serve_front
from tests.server.fake import fake_front

access_log.QUEUE_BYTES, access_log.FLUSH_S = 16384, 0.2
config = ServerConfig(port=0, log_level="debug", log_file=sys.argv[1] if sys.argv[1:] else None)
log = start_log(config)
serve_front(lambda report: fake_front(), config, lambda server: print(server.url, flush=True), log=log)
log.flush()
"""


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def client_of(process: subprocess.Popen[str]) -> Client:
    assert process.stdout is not None
    client = Client(process.stdout.readline().strip())
    assert wait_until(lambda: client.get("/ready").status == 200)
    return client


def test_a_server_with_a_full_pipe_as_stderr_answers_counts_and_ends() -> None:
    with started() as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        client = client_of(process)

        def dropped() -> float:
            text = client.get("/metrics").body.decode()
            return float(text.split("\nplait_log_lines_dropped_total ")[1].split()[0])

        assert dropped() == 0.0
        for _ in range(400):
            assert client.get("/health").status == 200
        assert wait_until(lambda: dropped() > 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "listening on" in process.stderr.read()


def test_a_hangup_opens_a_renamed_log_file_again(tmp_path: Path) -> None:
    file, old = tmp_path / "plait.log", tmp_path / "plait.log.1"
    with started(str(file)) as process:
        client = client_of(process)
        client.request("GET", "/version", headers={"x-request-id": "first"})
        assert wait_until(lambda: "id=first " in file.read_text())
        file.rename(old)
        process.send_signal(signal.SIGHUP)
        assert wait_until(lambda: file.exists() and "reloaded" in file.read_text())
        client.request("GET", "/version", headers={"x-request-id": "second"})
        assert wait_until(lambda: "id=second " in file.read_text())
        assert "id=second " not in old.read_text()
        file.unlink()
        tmp_path.chmod(0o500)  # where it can be made no more, unless one is root
        process.send_signal(signal.SIGHUP)
        client.request("GET", "/version")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        tmp_path.chmod(0o700)
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def logged(writer: LogWriter, text: str) -> None:
    writer.handle(logging.LogRecord("plait", logging.INFO, "", 0, text, (), None))


def test_what_does_not_fit_is_dropped_and_what_comes_after_says_so(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "QUEUE_BYTES", 1000)
    monkeypatch.setattr(access_log, "STDERR", pipe[1])
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    writer = LogWriter()
    logged(writer, "x" * 20_000)  # keeps the thread in a write
    assert wait_until(lambda: writer._size == 0)
    for i in range(100):
        logged(writer, f"line {i:03d}")
    assert 80 < writer.num_dropped < 100
    found: list[bytes] = []

    def read() -> None:
        while piece := os.read(pipe[0], 65536):
            found.append(piece)

    reading = threading.Thread(target=read)
    reading.start()
    writer.flush()
    logged(writer, "last")
    writer.flush()
    os.close(pipe[1])
    reading.join(PATIENCE_S)
    lines = b"".join(found).decode().splitlines()[1:]
    assert lines[:2] == ["line 000", "line 001"]
    assert lines[-2] == f"the log was not written in time: {writer.num_dropped} lines were dropped here"
    assert lines[-1] == "last"


def test_a_file_that_cannot_be_written_costs_lines_and_nothing_else() -> None:
    writer = LogWriter("/dev/full")
    for _ in range(3):
        logged(writer, "lost")
        writer.flush()
    assert writer.num_dropped == 3


def test_a_file_that_cannot_be_opened_is_refused_and_a_new_one_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_file"):
        LogWriter(str(tmp_path / "none" / "plait.log"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="log_file"):  # at once, although it has no reader
        LogWriter(str(tmp_path / "fifo"))
    (tmp_path / "plait.log").write_text("cut by a cra")
    writer = LogWriter(str(tmp_path / "plait.log"))
    with pytest.raises(ConfigError, match="log_file"):
        writer.reopen(str(tmp_path / "none" / "plait.log"))
    logged(writer, "still here")
    writer.flush()
    assert (tmp_path / "plait.log").read_text() == "cut by a cra\nstill here\n"


def test_a_line_that_a_full_disk_cut_spoils_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "plait.log", os.write
    writer, space = LogWriter(str(path)), [5]

    def write_what_fits(fd: int, data: bytes) -> int:
        fits = data[: space[0]] if fd == writer._fd else data
        space[0] -= len(fits)
        if not fits:
            raise OSError(errno.ENOSPC, "the disk is full")
        return write(fd, fits)

    monkeypatch.setattr(os, "write", write_what_fits)
    for text in ("first", "second", "third"):
        logged(writer, text)
        writer.flush()
    space[0] = 1000
    logged(writer, "fourth")
    writer.flush()
    assert path.read_text().splitlines() == [
        "first",
        "the log was not written in time: 3 lines were dropped here",
        "fourth",
    ]
    assert writer.num_dropped == 3
