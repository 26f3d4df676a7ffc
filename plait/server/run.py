"""`plait serve`: listen first, load the model in a thread meanwhile, and shut down in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError
from plait.server.app import create_app
from plait.server.check_options import check_options, check_templates
from plait.server.gateway import tracing
from plait.server.gateway.access_log import LogWriter, follow, start_log
from plait.server.gateway.middleware import Traffic
from plait.server.gateway.request_context import LoadingState
from plait.server.gateway.served_models import ServedModels
from plait.server.http import connection, listening, transfer
from plait.server.http.address_file import ServerAddress, local_address, remove_address, write_address
from plait.server.http.connection import READ_BYTES, Reads
from plait.server.http.hosts import is_loopback
from plait.server.models.only import OnlyModel
from plait.server.store.store import open_store
from plait.server.stored.state import StoredState

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.server.store.store import Store
    from plait.worker.start_process import StartedProcess

logger = logging.getLogger("plait.server")
KEEP_ALIVE_S = 5  # of an idle connection; a client that returns opens another in a millisecond
BACKLOG = 2048
LOADING_ENDS_S = 20.0  # a thread inside torch when Python ends would abort the process
SPARE_FILES = 512  # weights, kernels, sockets of the engine
CLOSING_S = 5.0  # after the time to finish: to report to open streams that the server stops
Report = Callable[[str, int, int], None]
Load = Callable[[Report], "Front"]
Reread = Callable[[], ServerConfig]


def run_server(
    model: str,
    engine: EngineConfig,
    server: ServerConfig,
    reread: Reread | None = None,
    begun: StartedProcess | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT. Raises ConfigError for a taken port, and what loading raises.

    `reread`: the server's options as they are now, for SIGHUP; raises ConfigError. `begun`: the engine's
    process, started already.
    """

    def load(report: Report) -> Front:
        from plait.frontend.frontend import Parsers
        from plait.worker.client import EngineProcess, load_process
        from plait.worker.supervisor import Patience

        parsers = Parsers(server.tool_call_parser, server.reasoning_parser)
        patience = Patience(
            stalled_s=server.step_timeout_s,
            frozen_s=server.frozen_timeout_s,
            loading_s=server.loading_timeout_s,
            goes_on=server.on_engine_lost == "retry",
        )
        front = load_process(model, engine, report, parsers, patience, begun)
        if server.startup_digest:
            from plait.frontend.reply_digest import record_digest

            record_digest(front)
        if publisher is not None:
            assert isinstance(front.loop, EngineProcess)
            publisher.follow(front.loop, server.served_model_name or front.name)
        return front

    check_options(engine, server)
    check_templates([engine])
    log = start_log(server)
    allow_files(server.max_connections + SPARE_FILES)
    publisher = None
    if server.kv_events is not None:
        from plait.server.gateway.kv_events import open_publisher

        publisher = open_publisher(server.kv_events, server)
    try:
        serve_front(load, server, reread=reread, log=log)
    finally:
        if publisher is not None:
            publisher.close()
        log.flush()


def serve_front(
    load: Load,
    config: ServerConfig,
    on_listen: Callable[[Server], None] | None = None,
    reread: Reread | None = None,
    log: LogWriter | None = None,
) -> None:
    """Serve what `load(report)` returns, which runs in a thread of its own while HTTP answers already."""
    loading = LoadingState(timeout_s=config.loading_timeout_s)
    models = OnlyModel(loading, config)

    def begin(server: Server) -> threading.Thread:
        thread = threading.Thread(
            target=load_only, args=(load, models, server), name="plait-load", daemon=True
        )
        logger.info("listening on %s; the model is loading", server.url)
        thread.start()
        if on_listen is not None:
            on_listen(server)
        return thread

    serve_models(models, config, begin, reread, log)


def serve_models(
    models: ServedModels,
    config: ServerConfig,
    on_listen: Callable[[Server], threading.Thread | None] | None = None,
    reread: Reread | None = None,
    log: LogWriter | None = None,
) -> None:
    """Serve until a signal. `on_listen` may return the thread that loads: it gets time to end.

    Raises ConfigError for a taken port and an address file that cannot be written, and the fault that ended
    the server.
    """
    store = open_store(config)
    try:
        sock = listen(config.host, config.port)
        try:
            server = Server(models, config, sock, reread, log, store)
        except BaseException:
            sock.close()
            raise
        if not (config.api_key or config.api_key_file or is_loopback(config.host)):
            logger.warning("every client that reaches %s may use it: --api-key sets a key", config.host)
        _serve_socket(server, sock, models, on_listen)
    finally:
        if store is not None:
            store.close()


def _serve_socket(
    server: Server,
    sock: socket.socket,
    models: ServedModels,
    on_listen: Callable[[Server], threading.Thread | None] | None,
) -> None:
    thread = None
    try:
        server.publish_address()
        if on_listen is not None:
            thread = on_listen(server)
        server.run(sockets=[sock])
    finally:
        server.withdraw_address()
        sock.close()
        if thread is not None:
            thread.join(LOADING_ENDS_S)
        models.close()
    if server.fault is not None:
        raise server.fault


def load_only(load: Load, models: OnlyModel, server: Server) -> None:
    """Load the only model, in a thread of its own. A failure ends the server, and `fault` says why."""
    loading = models.loading
    try:
        front = load(loading.report)
    except BaseException as error:
        if not loading.stopping:
            server.fault, server.should_exit = error, True
        return
    if loading.arrive(front):
        logger.info("serving %s on %s", *models.fronts(), server.url)
    else:
        front.close(drain=False)


def allow_files(wanted: int) -> None:
    """Let the process open so many files, as far as its hard limit lets it: each connection is one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < wanted:
        logger.warning("%d open files are allowed and %d may be needed: see `ulimit -n`", soft, wanted)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        cause = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        text = f"cannot listen on {host}:{port}: {cause}; choose another --host or --port"
        raise ConfigError(text) from error


class Server(uvicorn.Server):
    """uvicorn with our shutdown: open requests get time, then an error; a second signal ends them at once.

    SIGHUP has it take the options of `reread()` that can change while it runs, the keys and the certificate.
    """

    def __init__(
        self,
        models: ServedModels,
        config: ServerConfig,
        sock: socket.socket,
        reread: Reread | None = None,
        log: LogWriter | None = None,
        store: Store | None = None,
    ) -> None:
        self.models, self._timeout_s = models, config.shutdown_timeout_s
        self._reread: Reread = reread or (lambda: config)
        self._should_reload, self._log = False, log
        self.fault: BaseException | None = None
        self.traffic = Traffic(config, tracing.recorder(config), log, names_models=models.keeps_time)
        self._certificate = listening.certificate(config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._scheme, self._port = "https" if self._certificate else "http", sock.getsockname()[1]
        self.url = f"{self._scheme}://{host}:{self._port}"
        self._address: ServerAddress | None = None
        self._state = None if store is None else StoredState(store, self.traffic, models)
        app = create_app(models, config, self.traffic, self._state)
        self._routes = app.router
        settings: dict[str, Any] = {
            "http": functools.partial(
                connection.Connection,
                reject_early=app.state.reject_early,
                max_connections=config.max_connections,
                max_head_bytes=transfer.MAX_HEAD_BYTES,
            ),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": round(CLOSING_S),
            "callback_notify": self._look_around,
            "timeout_notify": 0,  # uvicorn looks once a second whether it is time
        }
        super().__init__(uvicorn.Config(app, **settings))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does: it has no option for the time of a TLS handshake."""
        await self.lifespan.startup()
        self.models.begin()
        if self._state is not None:
            await self._state.start(self._routes)

        buffer = memoryview(bytearray(READ_BYTES))

        def connect() -> asyncio.BaseProtocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return Reads(made, buffer)

        options: dict[str, Any] = {"backlog": BACKLOG}
        if self._certificate is not None:
            options |= {"ssl": self._certificate.context, "ssl_handshake_timeout": connection.HEAD_TIMEOUT_S}
        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(connect, sock=sock, **options) for sock in sockets or ()]
        self.started = True

    def publish_address(self) -> None:
        """Write where local programs reach the server, if it has an address file. Raises ConfigError."""
        config = self.traffic.config
        address = local_address(self._scheme, config.host, self._port, config.allowed_host)
        if config.address_file is not None and address != self._address:
            write_address(config.address_file, address)
            self._address = address

    def withdraw_address(self) -> None:
        path = self.traffic.config.address_file
        if path is not None and self._address is not None:
            remove_address(path, self._address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets open requests finish, the second does not; the exit code stays 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn's, and SIGHUP where there is one."""
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is None or threading.current_thread() is not threading.main_thread():
            with super().capture_signals():
                yield
            return
        before = signal.signal(hangup, self.ask_reload)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(hangup, before)

    def ask_reload(self, sig: int = 0, frame: FrameType | None = None) -> None:
        """Reload soon. From any thread, and from a signal."""
        self._should_reload = True

    async def _look_around(self) -> None:
        """Once a second: reload if requested, load a certificate of which the files changed, and end if the
        engine is given up.
        """
        if self._should_reload:
            self._should_reload = False
            self._reload()
        elif self._certificate is not None:
            self._certificate.reload_changed()
        self.models.look_around()
        fault = self.models.fault
        if fault is not None and not self.should_exit:
            logger.critical("the server ends: %s", fault)
            self.fault, self.should_exit = fault, True

    def _reload(self) -> None:
        before = self.traffic.config
        try:
            found = self._reread()
            if self._log is not None:
                self._log.reopen(found.log_file)
            if self._certificate is not None:
                self._certificate.reload()
            self.traffic.reload(found)
            self.publish_address()
        except ConfigError as error:
            logger.error("reload: %s; what was in use stays", error)
            return
        now = self.traffic.config
        if (now.log_level, now.log_format) != (before.log_level, before.log_format):
            if self._log is not None:
                follow(now, self._log)
            for front in self.models.fronts().values():
                front.follow_log_levels()
        logger.info("reloaded: keys, limits, hosts, log and certificate")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests finish while new ones get 503, end those that take too long, stop listening."""
        self.models.stop()
        if self._state is not None:
            await self._state.pause()
        if self.traffic.num_working:
            logger.info("stopping; %d open requests get %g s", self.traffic.num_working, self._timeout_s)
        ending = asyncio.ensure_future(self._end_streams())
        try:
            await self._finish()
            if not self.force_exit:
                await listening.drain(sockets or ())
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending
            if self._state is not None:
                await self._state.close()
            self.traffic.flush()

    async def _finish(self) -> None:
        """Wait until no request is in work, a second signal came, or time is over.

        Connections stay open: a request on one of them is answered, and the connection is closed after that.
        """
        deadline = time.monotonic() + self._timeout_s + CLOSING_S
        while self.traffic.num_working and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.force_exit:
            for one in [*self.server_state.connections]:
                one.transport.abort()

    async def _end_streams(self) -> None:
        await asyncio.sleep(self._timeout_s)
        await asyncio.to_thread(self.models.close)
