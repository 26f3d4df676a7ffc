"""`plait serve` with several models: an engine's process for each that is loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from plait import resource_limits
from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.frontend.frontend import Front, Parsers
from plait.server.check_options import check_formats, check_options, check_templates
from plait.server.gateway.access_log import start_log
from plait.server.gateway.served_models import measure_front
from plait.server.models.catalog import ModelCatalog, ModelEntry
from plait.server.models.loading_threads import Load, Report
from plait.server.models.placement import MemoryBudget
from plait.server.models.pool import ModelPool
from plait.server.models.residents import ResidentModels
from plait.server.run import SPARE_FILES, Reread, Server, allow_files, serve_models
from plait.worker.client import load_process
from plait.worker.supervisor import Patience

if TYPE_CHECKING:
    from plait.worker.start_process import StartedProcess

logger = logging.getLogger("plait.server")
MEMORY_SHARE = 0.9  # of what is free when the server starts
FILES_OF_A_MODEL, USUAL_LOADED = 64, 16  # its processes' pipes and sockets; models at a time


def run_models(
    catalog: ModelCatalog,
    config: ServerConfig,
    reread: Reread | None = None,
    begun: StartedProcess | None = None,
    on_listen: Callable[[Server], None] | None = None,
) -> None:
    """Serve the models of a catalogue until SIGTERM or SIGINT; the rest as `run_server`.

    `begun`: the process of the first model's engine.
    """
    if config.kv_events is not None:
        raise ConfigError("kv_events: readers know one model for each address; serve one model")
    entries = [*catalog.entries, *([catalog.template] if catalog.template else [])]
    for entry in entries:
        check_options(entry.engine, config)
        check_formats(entry.tool_call_parser, entry.reasoning_parser)
    check_templates(entry.engine for entry in entries)
    residents = ResidentModels(config, find_budget(config), make_load(config, begun), measure_front)
    pool = ModelPool(catalog, config, residents)
    log = start_log(config)
    num_loaded = min(len(catalog.entries), config.max_loaded_models or USUAL_LOADED)
    allow_files(config.max_connections + SPARE_FILES + FILES_OF_A_MODEL * num_loaded)

    def begin(server: Server) -> None:
        logger.info("listening on %s; %d models are served", server.url, len(catalog.entries))
        if on_listen is not None:
            on_listen(server)

    try:
        serve_models(pool, config, begin, reread, log)
    finally:
        log.flush()


def find_budget(config: ServerConfig) -> MemoryBudget:
    """What all models may take together: as the options say, or a share of what is free now."""
    free = resource_limits.free_memory()
    usual = None if free is None else int(free * MEMORY_SHARE)
    return MemoryBudget(config.models_memory or usual, config.max_loaded_models)


def make_load(config: ServerConfig, begun: StartedProcess | None = None) -> Load:
    """Loads a model into a process of its own; the first gets `begun`."""
    patience = Patience(
        stalled_s=config.step_timeout_s,
        frozen_s=config.frozen_timeout_s,
        loading_s=config.loading_timeout_s,
        goes_on=config.on_engine_lost == "retry",
    )
    spare, lock = [begun], threading.Lock()

    def load(entry: ModelEntry, report: Report) -> Front:
        with lock:
            process = spare.pop() if spare else None
        tools = entry.tool_call_parser or config.tool_call_parser
        parsers = Parsers(tools, entry.reasoning_parser or config.reasoning_parser)
        front = load_process(entry.source, entry.engine, report, parsers, patience, process)
        if not config.startup_digest:
            return front
        from plait.frontend.reply_digest import record_digest

        return record_digest(front)

    return load
