"""`plait cluster status` of a running cluster, and the file of `plait cluster config` as Ray reads it.

The tests go on with the cluster that `test_rollouts` leaves: two gateways, one or two replicas.
"""

from __future__ import annotations

import os
import signal

import pytest

from plait.cli.cluster import describe_status
from plait.errors import ConfigError
from plait.version import __version__
from tests.cluster.ray_serve.running import (
    MODEL,
    RunningCluster,
    check,
    read_json,
    run_plait,
    wait_until,
)

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_status_has_every_gateway_with_its_replicas_and_counts(
    running: RunningCluster, expected: list[str]
) -> None:
    if len(running.pids("gateway")) != 2:  # this test runs alone
        running.nodes.add_node(num_cpus=8)  # for the update's surge
        running.run(gateways="2")
    running.wait_gateways(2)
    check(running.streams(), expected)

    def has_settled() -> bool:
        rows = read_json(running.ask_status())["gateways"]
        return all(replica["state"] == "ready" for row in rows for replica in row["replicas"])

    wait_until(has_settled, "a replica of an earlier test is still leaving")
    found = read_json(running.ask_status())
    assert {row["pid"] for row in found["gateways"]} == {*running.pids("gateway")}
    assert found["status"] == "RUNNING"
    assert found["deployments"]["gateway"] == {"RUNNING": 2}
    for row in found["gateways"]:
        assert row["version"].startswith(__version__)  # one node has another version
        assert row["states"]["ready"] == len(row["replicas"]) >= 1
        assert {replica["state"] for replica in row["replicas"]} == {"ready"}
        assert len({replica["digest"] for replica in row["replicas"]} - {""}) == 1
        assert row["model"]
        assert row["arithmetic"].startswith("fp_")
    assert sum(sum(row["routed"].values()) for row in found["gateways"]) > 0
    lines = describe_status(found)
    assert not any("did not answer" in line for line in lines)


def test_a_status_says_that_a_gateway_hangs_and_has_the_other(running: RunningCluster) -> None:
    running.wait_gateways(2)
    stopped, working = running.pids("gateway")
    os.kill(stopped, signal.SIGSTOP)
    try:
        answer = running.ask_status()
    finally:
        os.kill(stopped, signal.SIGCONT)
    found = read_json(answer)
    assert [row["pid"] for row in found["gateways"]] == [working]
    assert "1 of 2 gateways did not answer" in describe_status(found)


def test_a_ray_that_does_not_start_is_an_error_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from plait.cluster.ray_serve.run import connect

    def time_out(**options: object) -> None:
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", time_out)
    with pytest.raises(ConfigError, match="Ray does not start here: The current node timed out during"):
        connect(None, 2)


def test_the_file_of_a_config_is_one_that_ray_reads_and_builds() -> None:
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    options = [
        "--replicas",
        "2..8",
        "--cpus",
        "3",
        "--gateways",
        "3",
        "--max-num-seqs",
        "7",
        "--port",
        "8001",
    ]
    found = read_json(run_plait("cluster", "config", str(MODEL), *options))
    schema = ServeDeploySchema.model_validate(found)
    (application,) = schema.applications
    built = import_attr(application.import_path)(application.args)
    gateway = built._bound_deployment
    assert gateway.num_replicas == 3
    engines, engine, *_ = gateway.init_args
    assert engines._bound_deployment._deployment_config.autoscaling_config.max_replicas == 8
    assert engines._bound_deployment.ray_actor_options["num_cpus"] == 3
    assert engine["max_num_seqs"] == 7
    assert schema.http_options.port == 8001
