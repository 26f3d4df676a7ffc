"""The manifests of deploy/platforms name only options, paths and ports that the server has."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import yaml

from plait.config import EngineConfig, ServerConfig, option_names
from tests.test_deploy import DEPLOY, paths, serve_options

PLATFORMS = DEPLOY / "platforms"
RUN = "plait serve "


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((PLATFORMS / name).read_text("utf-8")))


def given(args: list[str]) -> dict[str, str]:
    """Flag → value; every flag must be one of `plait serve`."""
    found = dict(zip(args[::2], args[1::2], strict=True))
    assert {*found} <= serve_options()
    return found


def test_every_manifest_is_read_by_a_test() -> None:
    assert {path.name for path in PLATFORMS.iterdir()} == {"kserve.yaml", "kuberay.yaml", "skypilot.yaml"}


def test_kserve_runs_the_server_where_its_probes_and_its_service_look() -> None:
    runtime, service = documents("kserve.yaml")
    (container,) = runtime["spec"]["containers"]
    options = given(container["args"])
    port = int(options["--port"])
    assert [one["containerPort"] for one in container["ports"]] == [port]
    probes = {name: one["httpGet"] for name, one in container.items() if name.endswith("Probe")}
    assert {one["port"] for one in probes.values()} == {port}
    assert {one["path"] for one in probes.values()} <= {*paths()}
    assert probes["livenessProbe"]["path"] == probes["startupProbe"]["path"] == "/live"
    assert probes["readinessProbe"]["path"] == "/ready"
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    assert options["--model"] == "/mnt/models"


def test_skypilot_runs_the_server_where_it_probes() -> None:
    (task,) = documents("skypilot.yaml")
    line = task["run"].strip()
    assert line.startswith(RUN)
    options = given(line.removeprefix(RUN).split())
    assert int(options["--port"]) == task["resources"]["ports"]
    assert options["--host"] == "0.0.0.0"
    assert options["--model"] == '"$MODEL"'
    assert "MODEL" in task["envs"]
    assert task["service"]["readiness_probe"]["path"] in paths()


def test_kuberays_application_gets_options_that_there_are() -> None:
    (service,) = documents("kuberay.yaml")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = app["import_path"].partition(":")
    parent = module.rpartition(".")[0]
    if importlib.util.find_spec(parent) is None:
        pytest.skip(f"{parent} is not part of this installation")
    path = importlib.util.find_spec(module)
    assert path is not None
    assert path.origin is not None
    with open(path.origin, encoding="utf-8") as file:
        assert f"\ndef {function}(" in file.read()
    config = importlib.import_module("plait.cluster.config")
    known = {*option_names(config.ClusterConfig), *option_names(EngineConfig), *option_names(ServerConfig)}
    assert app["args"].keys() - {"model"} <= known
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    least, most = app["args"]["replicas"].split("..")
    assert (workers["minReplicas"], workers["maxReplicas"]) == (int(least), int(most))
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["cpu"]) > app["args"]["cpus"]
    (head,) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    for each in (head, container):
        assert {one["name"]: one["value"] for one in each["env"]} == config.RAY_ENVIRONMENT
