"""`plait serve`: HTTP first, the model behind it as soon as it is loaded, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from plait.config import KIB, EngineConfig, ServerConfig
from plait.errors import ConfigError
from plait.server.app import create_app
from plait.server.connection import Connection
from plait.server.loading import Loading

if TYPE_CHECKING:
    from plait.engine.front import Front

logger = logging.getLogger("plait.server")
MAX_HEADER_BYTES = 16 * KIB
KEEP_ALIVE_S = 5
BACKLOG = 2048
LOADING_ENDS_S = 20.0  # a thread inside torch when Python ends would abort the process
CLOSING_S = 5.0  # after the time to finish: to tell open streams that the server stops
Report = Callable[[str, int, int], None]
Load = Callable[[Report], "Front"]


def serve(model: str, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model until SIGTERM or SIGINT. Raises ConfigError for a taken port, and what loading raises."""

    def load(report: Report) -> Front:
        from plait.engine.process import load_process

        return load_process(model, engine, report)

    _log_to_stderr()
    serve_front(load, server)


def serve_front(load: Load, config: ServerConfig, on_listen: Callable[[Server], None] | None = None) -> None:
    """Serve what `load(report)` returns, which runs in a thread of its own while HTTP answers already."""
    sock = listen(config.host, config.port)
    loading = Loading()
    server = Server(loading, config, sock)
    thread = threading.Thread(target=server.load, args=(load,), name="plait-load", daemon=True)
    logger.info("listening on %s; the model is loading", server.url)
    thread.start()
    if on_listen is not None:
        on_listen(server)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
        thread.join(LOADING_ENDS_S)
        if loading.front is not None:
            loading.front.close(drain=False)
    if server.fault is not None:
        raise server.fault


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        text = f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        raise ConfigError(text) from error


class Server(uvicorn.Server):
    """uvicorn with our own end: what runs gets its time, then is told; a second signal hurries."""

    def __init__(self, loading: Loading, config: ServerConfig, sock: socket.socket) -> None:
        self._loading, self._timeout_s = loading, config.shutdown_timeout_s
        self._served_name = config.served_model_name
        self.fault: BaseException | None = None
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{sock.getsockname()[1]}"
        settings: dict[str, Any] = {
            "http": Connection,
            "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": max(1, round(config.shutdown_timeout_s + CLOSING_S)),
        }
        super().__init__(uvicorn.Config(create_app(loading, config), **settings))

    def load(self, load: Load) -> None:
        """Runs in its own thread. A failure ends the server, and `fault` says why."""
        try:
            front = load(self._loading.report)
        except BaseException as error:
            if self._loading.stopping:
                return
            self.fault = error
            self.should_exit = True
            return
        if self._loading.arrive(front):
            logger.info("serving %s on %s", self._served_name or front.name, self.url)
        else:
            front.close(drain=False)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks to finish, the second not to wait; the exit code stays 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let open requests finish, and end those that take too long with an error."""
        self._loading.stop()
        if self._loading.front is not None and self.server_state.tasks:
            logger.info("stopping; open requests get %g s to finish", self._timeout_s)
        ending = asyncio.ensure_future(self._end_streams())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def _end_streams(self) -> None:
        await asyncio.sleep(self._timeout_s)
        if self._loading.front is not None:
            await asyncio.to_thread(self._loading.front.close, drain=False)


def _log_to_stderr() -> None:
    """Our own messages, and uvicorn's warnings, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("plait", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.propagate = False
        log.handlers = [handler]
