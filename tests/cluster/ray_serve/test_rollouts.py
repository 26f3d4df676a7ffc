"""Changes of a running cluster under load: another version of Plait, an update, fewer replicas, one gateway."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.ray_serve.running import RunningCluster, check, copy_as_other_version

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_streams_go_to_another_version_only_where_no_equal_replica_is_left(
    running: RunningCluster, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copy_as_other_version(tmp_path_factory.mktemp("other"))
    running.wait_ready(1)
    running.nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(folder)})
    running.run(replicas="2")
    running.wait_ready(2)
    replicas = running.describe()["replicas"]
    print(replicas)
