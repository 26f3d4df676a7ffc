"""`plait cluster`: a model on several engines, with Ray Serve. Ray is imported by its commands alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from types import FrameType, ModuleType
from typing import NotRequired, TypedDict, TypeVar

import click
from click.core import ParameterSource

from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    Decorator,
    common_options,
    config_file_option,
    config_options,
    engine_options,
    json_option,
    model_option,
    options,
    write_json,
)
from plait.cli.serve import merge_settings, read_table
from plait.cluster.config import NO_RETURN, NOT_COMPUTED, NOT_SERVED, OWN_RAY_ENVIRONMENT, ClusterConfig
from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError

NO_RAY = "cluster: it needs Ray Serve; install it with: pip install 'plait-engine[cluster]'"
C = TypeVar("C", EngineConfig, ServerConfig, ClusterConfig)
Configs = tuple[EngineConfig, ServerConfig, ClusterConfig]


@click.group()
def cluster() -> None:
    """Serve a model with several engines, on one machine or many, over Ray Serve.

    A stream outlives the engine that computes it: another one goes on with the same tokens.
    """


def cluster_options() -> Decorator:
    """What `serve` and `config` take: every option that holds in a cluster."""
    server = config_options(ServerConfig, without=tuple(NOT_SERVED))
    engine = engine_options(without=tuple(NOT_COMPUTED))
    parts = (model_option(), config_file_option(), config_options(ClusterConfig), server, engine)
    return options([*parts, common_options()])


@cluster.command("serve", cls=GroupedCommand)
@cluster_options()
@click.pass_context
def serve_command(ctx: click.Context, /, model: str, config: str | None, **given: object) -> None:
    """Serve a model over the OpenAI API with several engines; Ctrl-C stops it.

    Without --address it starts a Ray cluster on this machine, which ends with the command. Options are
    those of `plait serve`, and [cluster] of --config.

    \b
    plait cluster serve ./model --replicas 2 --threads 4
    plait cluster serve org/name --address auto --replicas 2..8 --cpus 16
    """
    engine, server, wanted = read_configs(ctx, config, given)
    run = import_run()
    if wanted.address is None:
        for name, value in OWN_RAY_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    is_over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        is_over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    run.run_cluster(model, engine, server, wanted, lambda text: print(text, flush=True), is_over)


@cluster.command("status")
@click.option("--address", default="auto", show_default=True, help="HOST:PORT of a Ray cluster, or auto")
@json_option()
@common_options()
def status_command(address: str, as_json: bool) -> None:
    """The replicas of a running cluster: state, arithmetic, open streams; what moved, and why."""
    found = import_run().read_status(address)
    if as_json:
        write_json(found)
        return
    for line in describe_status(found):
        print(line)


@cluster.command("config", cls=GroupedCommand)
@cluster_options()
@click.pass_context
def config_command(ctx: click.Context, /, model: str, config: str | None, **given: object) -> None:
    """Write the file that `serve deploy` and KubeRay's RayService take.

    \b
    plait cluster config ./model --replicas 2..8 --cpus 16 > serve.yaml
    """
    engine, server, wanted = read_configs(ctx, config, given)
    run = import_run()
    sys.stdout.write(run.write_config(run.make_config(model, engine, server, wanted)))


def read_configs(ctx: click.Context, path: str | None, given: Mapping[str, object]) -> Configs:
    """From the command line, the environment and the file. Raises ConfigError."""
    explicit = {name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    values = dict(given)
    if values.get("cpu"):
        if values["device"] == "cuda":
            raise ConfigError("--cpu and --device cuda contradict each other; give one of them")
        values["device"] = "cpu"

    def make(kind: type[C], table: str) -> C:
        own = {field.name: values[field.name] for field in fields(kind) if field.name in values}
        return kind(**merge_settings(own, explicit, read_table(path, table)))

    return make(EngineConfig, "engine"), make(ServerConfig, "server"), make(ClusterConfig, "cluster")


def import_run() -> ModuleType:
    """The module that knows Ray. Raises ConfigError where Ray is not installed."""
    os.environ.update(NO_RETURN)
    try:
        from plait.cluster.ray_serve import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(NO_RAY) from error
    return run


class ReplicaRow(TypedDict):
    """A replica, as a gateway sees it."""

    name: str
    state: str
    arithmetic: str
    digest: NotRequired[str]  # an older gateway has none
    open: int
    restarts: int


class GatewayRow(TypedDict):
    """A gateway, with its counts by reason. `model`, `arithmetic`: fingerprints of what it serves."""

    name: str
    pid: int
    version: str
    model: str
    arithmetic: str
    open: int
    replicas: list[ReplicaRow]
    moved: dict[str, int]
    routed: dict[str, int]


class ClusterStatus(TypedDict):
    """What `read_status` returns."""

    status: str
    deployments: dict[str, dict[str, int]]
    gateways: list[GatewayRow]


def describe_status(found: ClusterStatus) -> list[str]:
    """Lines for a terminal."""
    lines = [f"plait: {found['status'].lower()}"]
    for name, states in found["deployments"].items():
        shown = ", ".join(f"{count} {str(state).lower()}" for state, count in states.items())
        lines.append(f"{name}: {shown or 'none'}")
    running = found["deployments"].get("gateway", {}).get("RUNNING", 0)
    if len(found["gateways"]) < running:
        lines.append(f"{running - len(found['gateways'])} of {running} gateways did not answer")
    for gateway in found["gateways"]:
        about = f"{len(gateway['replicas'])} replicas, {gateway['open']} open streams"
        served = f"version {gateway['version']}, model {gateway['model']}, arithmetic {gateway['arithmetic']}"
        lines.append(f"gateway {gateway['name']} (process {gateway['pid']}): {about}, {served}")
        for replica in gateway["replicas"]:
            computes = f"{replica['arithmetic']}, digest {replica.get('digest') or 'none'}"
            more = f"{replica['open']} open, {replica['restarts']} restarts, {computes}"
            lines.append(f"  {replica['name']}: {replica['state']}, {more}")
        for title, counts in (("moved", gateway["moved"]), ("routed", gateway["routed"])):
            text = ", ".join(f"{count} ({why})" for why, count in counts.items())
            lines.append(f"  {title}: {text or 'none'}")
    return lines
