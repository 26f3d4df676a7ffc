"""Images, compose.yaml, the dashboard and the systemd unit name only what the code has."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from plait.cli.main import cli
from plait.config import ServerConfig
from plait.engine.metric_registry import RemoteMetrics, make_registry
from plait.engine.metrics import Metrics
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.server.app import create_app
from plait.server.gateway.middleware import PUBLIC, Traffic
from plait.server.gateway.request_context import LoadingState
from tests.test_distribution import settings

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
SERVER = ServerConfig()


def serve_options() -> set[str]:
    found = cli.get_command(click.Context(cli), "serve")
    assert found is not None
    return {name for param in found.params for name in (*param.opts, *param.secondary_opts)}


def paths() -> set[str]:
    routes: list[Any] = list(create_app(LoadingState(), SERVER).routes)
    return {route.path for route in routes}


def steps(name: str) -> list[tuple[str, str]]:
    """(instruction, its text) of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text("utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    return found


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "plait.service", encoding="utf-8")
    return found


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_serves_on_the_port_it_exposes_and_is_checked_at_a_public_path(name: str) -> None:
    found = dict(steps(name))
    entry = json.loads(found["ENTRYPOINT"])
    assert entry[:2] == ["plait", "serve"]
    assert flags(entry) <= serve_options()
    port = entry[entry.index("--port") + 1]
    assert port == found["EXPOSE"] == str(SERVER.port)
    assert entry[entry.index("--host") + 1] == "0.0.0.0"
    health = cli.get_command(click.Context(cli), "health")
    assert health is not None
    checked = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert checked == ["plait", health.name], "it follows --port and --tls-cert by the address file"
    env = dict(pair.split("=", 1) for kind, text in steps(name) if kind == "ENV" for pair in text.split())
    (variable,) = {str(one.envvar) for one in health.params if one.name == "address_file"}
    assert Path(env[variable]).parent == Path("/dev/shm"), "the root may be read-only"
    assert "/live" in PUBLIC & paths()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_user_with_its_caches_on_a_volume(name: str) -> None:
    found = dict(steps(name))
    user = next(text for kind, text in steps(name) if kind == "RUN" and "useradd" in text)
    assert f"--uid {found['USER']} " in user
    assert int(found["USER"]) > 0
    assert f"--home-dir {found['VOLUME']} " in user
    env = dict(pair.split("=", 1) for kind, text in steps(name) if kind == "ENV" for pair in text.split())
    assert env["HOME"] == found["VOLUME"] == found["WORKDIR"]
    kinds = [kind for kind, _ in steps(name)]
    assert kinds.index("USER") > max(i for i, kind in enumerate(kinds) if kind == "RUN")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_from_files_that_its_context_has(name: str) -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").split() if line.startswith("!")}
    copied = {
        source
        for kind, text in steps(name)
        if kind == "COPY" and "--from=" not in text
        for source in text.split()[:-1]
    }
    shipping = {"examples/nano-hybrid", "tools/ship_kernels.py"}
    assert copied == (kept if name == "Dockerfile" else kept - shipping)
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_a_python_a_torch_and_an_extra_that_the_package_names(name: str) -> None:
    project = settings()["project"]
    (version,) = {text.partition("=")[2] for kind, text in steps(name) if kind == "ARG"}
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    runs = [text for kind, text in steps(name) if kind == "RUN" and text.startswith("pip install")]
    assert all("-c constraints.txt" in text for text in runs)
    assert runs[0].endswith(" torch")
    needed = {Requirement(one).name for one in project["dependencies"]}
    assert "torch" in needed
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', runs[-1])
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    assert ("cuda" in extras) == (name == "Dockerfile.cuda")
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert ("whl/cpu" in runs[0]) == (name == "Dockerfile")


def test_compose_starts_the_server_with_options_it_has() -> None:
    plait = compose()["services"]["plait"]
    assert flags(plait["command"]) <= serve_options()
    assert set(plait["environment"]) == {"PLAIT_API_KEY", "HF_TOKEN"}
    (port,) = plait["ports"]
    assert port == f"127.0.0.1:{SERVER.port}:{SERVER.port}"
    assert plait["volumes"] == [f"cache:{dict(steps('Dockerfile'))['VOLUME']}"]
    assert int(plait["stop_grace_period"].removesuffix("s")) > SERVER.shutdown_timeout_s
    assert (plait["read_only"], plait["cap_drop"]) == (True, ["ALL"])


def test_compose_names_files_volumes_and_services_that_are_there() -> None:
    found = compose()
    for service in found["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in found["volumes"] or (ROOT / source).is_file(), volume
        assert set(service.get("depends_on", ())) <= set(found["services"])
    override = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text("utf-8"))["services"]
    assert override["plait"]["shm_size"] == "1gb"  # a container has 64 MB, and NCCL needs more for each GPU
    assert set(override) <= set(found["services"])
    assert (ROOT / override["plait"]["build"]["dockerfile"]).is_file()


def test_prometheus_scrapes_the_service_and_grafana_reads_prometheus() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert job["metrics_path"] in paths()
    assert job["static_configs"] == [{"targets": [f"plait:{SERVER.port}"]}]
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yml").read_text("utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose()["services"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yml").read_text("utf-8"))["providers"]
    mounted = [volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/plait.json" in mounted
    dashboard = json.loads((DEPLOY / "grafana/plait.json").read_text("utf-8"))
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"}
    assert used == {source["uid"]}


class Counts:
    """A scheduler of which every number is 0."""

    cache_counts: Mapping[str, int] = {}
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=1, max_waiting=0, max_model_len=1)
    memory = Allocation((), (), 16, num_slots=0, max_step_len=1)

    def stats(self) -> Mapping[str, int]:
        return defaultdict(int)


def metric_labels() -> dict[str, set[str]]:
    """Every name that /metrics has, with the labels of its samples."""
    registry = CollectorRegistry()
    registry.register(RemoteMetrics(lambda number: False, lambda: (0, True)))
    traffic = Traffic(SERVER)
    traffic._requests.labels("route", "GET", "200").inc()
    traffic._seconds.labels("route").observe(1.0)
    found: dict[str, set[str]] = {}
    for one in (make_registry(Metrics(Counts()).families), registry, traffic.registry):
        for family in one.collect():
            for sample in (one for one in family.samples if not one.name.endswith("_created")):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_unit_starts_the_server_and_gives_it_time_to_stop() -> None:
    service = unit()["Service"]
    command = service["ExecStart"].split()
    assert [Path(command[0]).name, command[1]] == ["plait", "serve"]
    assert flags(command) <= serve_options()
    assert int(service["TimeoutStopSec"]) > SERVER.shutdown_timeout_s
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(service["LimitNOFILE"]) > SERVER.max_connections
    assert service["Environment"] == f"HOME=/var/cache/{service['CacheDirectory']}"
    assert {*service["RestartPreventExitStatus"].split()} == {"2", "3"}  # options, the model: operations.md
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["ProtectSystem"]) == (
        *("yes", "yes"),
        "strict",
    )
    assert "MemoryDenyWriteExecute" not in service  # it would forbid compiled kernels


def test_what_keeps_devices_from_the_unit_is_named_for_gpus() -> None:
    """`ProtectClock` is a list of allowed devices, too, before systemd 253: Ubuntu 22.04 has 249."""
    unit, docs = ((ROOT / name).read_text("utf-8") for name in ("deploy/plait.service", "docs/deploy.md"))
    limits = [name for name in ("PrivateDevices", "ProtectClock") if f"\n{name}=yes" in unit]
    assert limits
    assert not re.search("^Device(Allow|Policy)=", unit, re.MULTILINE)
    drop_in = docs.partition("[Service]\n")[2].partition("```")[0].split()
    assert drop_in == [f"{name}=no" for name in limits]
    (comment,) = re.findall(r"^# On a GPU: (.*) in a drop-in", unit, re.MULTILINE)
    assert comment.split(" and ") == drop_in


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    text = (DEPLOY / "plait.service").read_text("utf-8")
    file = tmp_path / "plait.service"
    file.write_text(text.replace("/opt/plait/bin/plait", "/bin/true"), "utf-8")  # which must be there
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rate = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(file)]
    assert subprocess.run(rate, capture_output=True, text=True).returncode == 0  # at most 2.0 of 10


def test_the_page_lists_every_extra() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    table = page.partition("| `plait-engine[…]` | adds |")[2].partition("\n\n")[0]
    rows = [(re.findall(r"`([\w-]+)`", row.split("|")[1]), row) for row in table.splitlines() if "`" in row]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    assert sorted(name for names, _ in rows for name in names) == sorted(extras)
    idle = {name for names, row in rows for name in names if "nothing yet" in row}
    assert idle == {name for name, packages in extras.items() if not packages}
