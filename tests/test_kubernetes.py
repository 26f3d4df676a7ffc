"""The manifests of deploy/kubernetes name only what the image, the server and each other have."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge

from plait.cluster.scaling import ScalingLimits
from plait.config import EngineConfig, ServerConfig
from plait.server.gateway.middleware import PUBLIC
from plait.server.gateway.vllm_metrics import Aliases
from tests.test_deploy import DEPLOY, flags, metric_labels, paths, serve_options, steps

FOLDER = DEPLOY / "kubernetes"
BASE, GATEWAY = FOLDER / "base", FOLDER / "gateway"
CONFIGS = {"kustomization.yaml", "endpoint-picker-config.yaml"}  # not sent to Kubernetes as they are
Objects = dict[tuple[str, str], dict[str, Any]]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def objects(*folders: Path) -> Objects:
    """(kind, name) → object, of every file that is a manifest."""
    files = [path for folder in folders for path in folder.glob("*.yaml") if path.name not in CONFIGS]
    found = [one for path in files for one in yaml.safe_load_all(path.read_text("utf-8"))]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found), "two objects have one name"
    return named


def pod(name: str = "plait") -> dict[str, Any]:
    found: dict[str, Any] = objects(BASE, GATEWAY)["Deployment", name]["spec"]["template"]
    return found


def container(name: str = "plait") -> dict[str, Any]:
    (found,) = pod(name)["spec"]["containers"]
    return dict(found)


def options() -> dict[str, Any]:
    return tomllib.loads((BASE / "plait.toml").read_text("utf-8"))


def server() -> ServerConfig:
    return ServerConfig(**options()["server"])


def test_kustomizations_list_every_manifest_and_files_that_are_there() -> None:
    base, gateway = read(BASE / "kustomization.yaml"), read(GATEWAY / "kustomization.yaml")
    assert {*base["resources"]} == {path.name for path in BASE.glob("*.yaml")} - CONFIGS
    assert {*gateway["resources"]} == {"../base"} | {p.name for p in GATEWAY.glob("*.yaml")} - CONFIGS
    for folder, one in ((BASE, base), (GATEWAY, gateway)):
        assert all(
            (folder / file).is_file() for maps in one["configMapGenerator"] for file in maps.get("files", ())
        )
    assert [image["name"] for image in base["images"]] == [container()["image"]]


def test_the_pod_starts_the_image_with_options_that_the_server_has() -> None:
    one = container()
    assert flags(one["args"]) <= serve_options()
    assert "command" not in one, "the entry point of the image is `plait serve`"
    EngineConfig(**options()["engine"])
    assert server().metrics_public, "Prometheus and the endpoint picker have no key"
    mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
    assert mounts.keys() == {"/etc/plait", "/tmp", dict(steps("Dockerfile"))["VOLUME"]}
    assert {*mounts.values()} == {volume["name"] for volume in pod()["spec"]["volumes"]}
    assert one["args"][one["args"].index("--config") + 1] == "/etc/plait/plait.toml"
    assert one["args"][one["args"].index("--model") + 1] == "$(MODEL)"
    assert {env["name"] for env in one["env"]} == {"MODEL", "PLAIT_API_KEY", "HF_TOKEN"}


def test_the_config_maps_that_pods_read_are_made() -> None:
    made = {
        maps["name"]: {*maps.get("files", ()), *(text.split("=")[0] for text in maps.get("literals", ()))}
        for folder in (BASE, GATEWAY)
        for maps in read(folder / "kustomization.yaml")["configMapGenerator"]
    }
    (model,) = [env["valueFrom"]["configMapKeyRef"] for env in container()["env"] if env["name"] == "MODEL"]
    assert model["key"] in made[model["name"]]
    for name, file in (
        ("plait", "/etc/plait/plait.toml"),
        ("plait-endpoint-picker", "endpoint-picker-config.yaml"),
    ):
        (maps,) = [one["configMap"]["name"] for one in pod(name)["spec"]["volumes"] if "configMap" in one]
        assert Path(file).name in made[maps]


def test_the_pod_runs_as_the_user_of_the_image_and_may_write_its_volumes_only() -> None:
    user, spec, one = int(dict(steps("Dockerfile"))["USER"]), pod()["spec"], container()
    context = spec["securityContext"]
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    assert context["runAsNonRoot"]
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is False, "a service `plait` would set PLAIT_PORT and the like"


def test_ports_of_image_pod_service_pool_and_scrapes_are_one() -> None:
    found, one = objects(BASE, GATEWAY), container()
    (port,) = one["ports"]
    assert port["containerPort"] == ServerConfig().port == int(dict(steps("Dockerfile"))["EXPOSE"])
    assert "port" not in options()["server"]
    (service,) = found["Service", "plait"]["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    assert found["InferencePool", "plait"]["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    notes = pod()["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(port["containerPort"])
    assert notes["prometheus.io/path"] in paths()


def test_probes_ask_public_paths_and_liveness_never_asks_health() -> None:
    one = container()
    asked = {kind: one[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert [probe["path"] for probe in asked.values()] == ["/live", "/live", "/ready"]
    assert {probe["path"] for probe in asked.values()} <= PUBLIC & paths()
    assert {probe["port"] for probe in asked.values()} == {one["ports"][0]["name"]}


def test_a_pod_that_stops_has_time_for_the_pause_and_for_open_replies() -> None:
    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["spec"]["terminationGracePeriodSeconds"] > pause + server().shutdown_timeout_s
    assert container("plait-endpoint-picker")["livenessProbe"]["grpc"]["port"] == 9003


def test_selectors_find_the_pods_and_references_find_objects() -> None:
    found = objects(BASE, GATEWAY)
    labels = pod()["metadata"]["labels"].items()
    pool, route = found["InferencePool", "plait"]["spec"], found["HTTPRoute", "plait"]["spec"]
    selectors = [
        *(
            found[kind, "plait"]["spec"]["selector"]["matchLabels"]
            for kind in ("Deployment", "PodDisruptionBudget")
        ),
        *(found["Service", "plait"]["spec"]["selector"], pool["selector"]["matchLabels"]),
    ]
    assert all(selector.items() <= labels for selector in selectors)
    target = found["HorizontalPodAutoscaler", "plait"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in found
    assert "replicas" not in found["Deployment", "plait"]["spec"], "the autoscaler sets it"
    (rule,) = route["rules"]
    assert {(ref["kind"], ref["name"]) for ref in rule["backendRefs"]} == {("InferencePool", "plait")}
    (match,) = rule["matches"]
    assert any(path.startswith(match["path"]["value"] + "/") for path in paths())


def test_the_pool_finds_the_picker_and_the_picker_the_pool() -> None:
    found, one = objects(BASE, GATEWAY), container("plait-endpoint-picker")
    reference = found["InferencePool", "plait"]["spec"]["endpointPickerRef"]
    service = found["Service", reference["name"]]["spec"]
    assert [port["port"] for port in service["ports"]] == [reference["port"]["number"]]
    assert service["selector"].items() <= pod("plait-endpoint-picker")["metadata"]["labels"].items()
    given = dict(word.removeprefix("--").split("=") for word in one["args"])
    ports = {port["name"]: str(port["containerPort"]) for port in one["ports"]}
    assert (given["grpc-port"], given["grpc-health-port"]) == (ports["grpc"], ports["health"])
    assert ("InferencePool", given["pool-name"]) in found
    (mount,) = one["volumeMounts"]
    assert given["config-file"] == f"{mount['mountPath']}/endpoint-picker-config.yaml"
    account = pod("plait-endpoint-picker")["spec"]["serviceAccountName"]
    binding = found["RoleBinding", account]
    assert [(subject["kind"], subject["name"]) for subject in binding["subjects"]] == [
        ("ServiceAccount", account)
    ]
    assert ("Role", binding["roleRef"]["name"]) in found


def vllm_names() -> set[str]:
    """The gauges that --metrics-vllm-names adds for a registry with ours."""
    registry = CollectorRegistry()
    for name in ("requests_waiting", "requests_running", "memory_usage_ratio"):
        Gauge(f"plait_{name}", name, registry=registry)
    labels = {"block_size": "16", "num_blocks": "9", "num_slots": "0", "arithmetic": ""}
    Gauge("plait_cache_config_info", "cache", labels, registry=registry).labels(**labels).set(1)
    return {family.name for family in Aliases(registry, "model").collect()}


def test_the_picker_reads_metrics_that_the_server_has() -> None:
    config = read(GATEWAY / "endpoint-picker-config.yaml")
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    used = {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]}
    (source,) = config["dataLayer"]["sources"]
    used |= {source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])}
    assert used | {"single-profile-handler"} == plugins.keys()
    assert plugins["metrics-data-source"]["path"] in paths()
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert (
        engine.pop("name")
        == extractor["defaultEngine"]
        == pod()["metadata"]["labels"]["llm-d.ai/engine-type"]
    )
    assert {*engine.values()} <= metric_labels().keys() | vllm_names()
    assert server().metrics_vllm_names


def test_the_autoscaler_reads_metrics_that_the_adapter_makes_of_those_that_the_server_has() -> None:
    scaler = objects(BASE)["HorizontalPodAutoscaler", "plait"]["spec"]
    targets = {
        m["pods"]["metric"]["name"]: float(m["pods"]["target"]["averageValue"]) for m in scaler["metrics"]
    }
    # The limits that the policy of a cluster has, too.
    assert targets == {"plait_waiting_seconds": ScalingLimits().max_queue_s, "plait_places_used_ratio": 1.0}
    rules = read(FOLDER / "prometheus-adapter.yaml")["rules"]["custom"]
    for name, rule in zip(targets, rules, strict=True):
        assert rule["name"] == {"matches": f"^{name}$", "as": name}
        assert rule["seriesQuery"].partition("{")[0] == name
        assert name in metric_labels()
    budget = objects(BASE)["PodDisruptionBudget", "plait"]["spec"]
    assert budget["maxUnavailable"] < scaler["minReplicas"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", [BASE, GATEWAY])
def test_kustomize_builds_the_tree_and_renames_config_maps_everywhere(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    named = {one["metadata"]["name"] for one in built if one["kind"] == "ConfigMap"}
    specs = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "Deployment"]
    mounted = {v["configMap"]["name"] for spec in specs for v in spec["volumes"] if "configMap" in v}
    read_by_name = {
        env["valueFrom"]["configMapKeyRef"]["name"]
        for spec in specs
        for env in spec["containers"][0]["env"]
        if "configMapKeyRef" in env.get("valueFrom", {})
    }
    assert mounted | read_by_name == named
    assert all("-" in name.removeprefix("plait") for name in named), "names end in a hash of the content"
