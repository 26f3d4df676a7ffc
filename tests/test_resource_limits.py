"""Limits of control groups, read from a folder that stands for the system's root."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import explain
from plait.errors import OutOfMemory
from plait.resource_limits import (
    cpu_quota,
    default_threads,
    describe_crowding,
    free_memory,
    is_free,
    is_memory_error,
    memory_limit,
    num_oom_kills,
    out_of_memory_text,
    physical_cores,
    process_memory,
    trim_heap,
)
from plait.worker.protocol import encode_error

GIB = 1 << 30
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup rw"
V1 = (
    "32 31 0:29 {inside} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {inside} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
)
LIMITED = """
import resource
from plait.resource_limits import is_free, out_of_memory_text
print(is_free(1 << 40))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(is_free(16 << 20), is_free(2 << 30))
print(out_of_memory_text(MemoryError()))
"""


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


def system(root: Path, group: str, mounts: str, **files: str) -> Path:
    """A root with these files, which are named below /sys/fs/cgroup."""
    texts = {"proc/self/cgroup": group, "proc/self/mountinfo": mounts}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path, four_cores: None) -> None:
    assert (cpu_quota(tmp_path), memory_limit(tmp_path), free_memory(tmp_path)) == (None, None, None)
    assert default_threads(tmp_path) == (4, "4 physical cores")


@pytest.mark.parametrize(
    ("threads", "quota", "words"),
    [
        (4, "max", None),
        (999, "max", "999 threads on 4 CPUs"),
        (4, "250000", "share a CPU quota of 2.5"),
        (2, "250000", None),
    ],
)
def test_more_threads_than_cpus_are_too_many(
    tmp_path: Path, four_cores: None, threads: int, quota: str, words: str | None
) -> None:
    found = describe_crowding(threads, system(tmp_path, "0::/", V2, **{"cpu.max": f"{quota} 100000"}))
    assert found is None if words is None else words in (found or "")


def test_two_threads_of_a_core_are_one_core(tmp_path: Path, four_cores: None) -> None:
    for cpu in range(4):
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert physical_cores(tmp_path) == 2


@pytest.mark.parametrize(
    ("text", "quota", "threads"),
    [
        ("150000 100000", 1.5, 1),
        ("299999 100000", 2.99999, 2),
        ("50000 100000", 0.5, 1),
        ("800000 100000", 8.0, 4),
        ("max 100000", None, 4),
        ("", None, 4),
        ("1 0", None, 4),
        ("0 100000", None, 4),
        ("nonsense", None, 4),
    ],
)
def test_a_quota_bounds_the_threads_rounded_down_and_at_least_one(
    tmp_path: Path, four_cores: None, text: str, quota: float | None, threads: int
) -> None:
    root = system(tmp_path, "0::/", V2, **{"cpu.max": text})
    assert cpu_quota(root) == quota
    assert default_threads(root)[0] == threads
    assert ("CPU quota" in default_threads(root)[1]) == (quota is not None)


def test_the_tightest_quota_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = {"cpu.max": "900000 100000", "pod/cpu.max": "200000 100000", "pod/a b/cpu.max": "max 100000"}
    root = system(tmp_path, "0::/pod/a b", V2, **files)
    assert cpu_quota(root) == 2.0
    (root / "sys/fs/cgroup/pod/a b/cpu.max").write_text("10000 20000")
    assert cpu_quota(root) == 0.5


def test_quota_and_memory_of_the_first_version(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/pod/cpu.cfs_quota_us": "350000",
        "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/pod/memory.limit_in_bytes": str(4 * GIB),
        "memory/pod/memory.usage_in_bytes": str(3 * GIB),
        "memory/pod/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "5:name=systemd:/x\n4:memory:/pod\n2:cpu,cpuacct:/pod\n0::/elsewhere"
    root = system(tmp_path, groups, V1.format(inside="/"), **files)
    assert (cpu_quota(root), memory_limit(root), free_memory(root)) == (3.5, 4 * GIB, 3 * GIB)


def test_a_mount_that_is_only_a_part_of_the_hierarchy(tmp_path: Path) -> None:
    """As in a container without a namespace of control groups: /docker/id is mounted as the whole."""
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    mounts = V1.format(inside="/docker/id")
    for group in ("/docker/id", "/docker/id/below", "/another"):
        root = system(tmp_path, f"2:cpu,cpuacct:{group}", mounts, **files)
        assert cpu_quota(root) == 1.0


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    mounts = r"31 23 0:28 / /sys/fs/cgroup/a\040b rw - cgroup2 cgroup rw"
    assert cpu_quota(system(tmp_path, "0::/", mounts, **{"a b/cpu.max": "200000 100000"})) == 2.0


def test_free_memory_is_what_the_tightest_group_leaves_at_most_the_machines(tmp_path: Path) -> None:
    files = {
        "memory.max": str(8 * GIB),
        "memory.current": str(7 * GIB),
        "memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}",
        "pod/memory.max": "max",
        "pod/memory.high": str(6 * GIB),
        "pod/memory.current": str(GIB),
    }
    root = system(tmp_path, "0::/pod", V2, **files)
    assert (memory_limit(root), free_memory(root)) == (6 * GIB, 4 * GIB)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {GIB // 1024} kB\n")
    assert free_memory(root) == GIB
    (root / "sys/fs/cgroup/pod/memory.current").write_text(str(9 * GIB))
    assert free_memory(root) == 0


@pytest.mark.parametrize(
    ("group", "mounts", "file"),
    [
        ("0::/a/b", V2, "a/b/memory.events"),
        ("0::/of/the/host", V2, "memory.events"),
        ("4:cpu,memory:/a\n0::/", V1.format(inside="/"), "memory/a/memory.oom_control"),
    ],
)
def test_num_oom_kills_reads_either_version_of_control_groups(
    tmp_path: Path, group: str, mounts: str, file: str
) -> None:
    system(tmp_path, group, mounts)
    assert num_oom_kills(tmp_path) is None
    (tmp_path / "proc" / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    assert num_oom_kills(tmp_path) == 7
    system(tmp_path, group, mounts, **{file: "oom 9\noom_kill 3\noom_group_kill 0"})
    assert num_oom_kills(tmp_path) == 3


def test_process_memory_counts_a_process_with_what_its_threads_started(tmp_path: Path) -> None:
    tasks = {7: {7: "8", 9: "11 12"}, 8: {8: ""}, 11: {11: ""}}
    for pid, threads in tasks.items():
        for thread, children in threads.items():
            place = tmp_path / f"proc/{pid}/task/{thread}"
            place.mkdir(parents=True)
            (place / "children").write_text(children)
        (tmp_path / f"proc/{pid}/statm").write_text(f"9000 {pid} 5 1 0 3 0")
    assert process_memory(7, tmp_path) == (7 + 8 + 11) * mmap.PAGESIZE
    assert process_memory(12, tmp_path) is None


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch_python.so: failed to map segment from shared object"), True),
        (chained(ImportError("numpy cannot be imported"), ImportError("x.so: failed to map segment")), True),
        (ImportError("No module named 'torch'"), False),
        (OSError(errno.ENOSPC, "No space left"), False),
        (ValueError("failed to map segment"), False),
    ],
)
def test_is_memory_error_sees_only_short_memory(error: BaseException, is_one: bool) -> None:
    assert is_memory_error(error) is is_one


def test_errors_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert not is_memory_error(one)


def test_a_limit_on_the_process_is_seen_and_named() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    free, limited, text = run.stdout.splitlines()
    assert free == str(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)
    assert limited == "True False"
    assert "this process may have 1024 MiB (ulimit -v)" in text
    assert is_free(1)


def test_without_a_limit_the_text_names_what_failed() -> None:
    assert "libx.so" in out_of_memory_text(ImportError("libx.so: failed to map segment"))


def test_what_cannot_be_mapped_is_out_of_memory_for_the_command_line_and_the_engine() -> None:
    error = ImportError("libtorch_python.so: failed to map segment from shared object")
    text, code = explain(error)
    assert (text.startswith("out of memory"), code) == (True, OutOfMemory.exit_code)
    assert encode_error(error) == ("OutOfMemory", text, None)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives nothing back")
def test_freed_memory_below_a_block_in_use_is_given_back() -> None:
    blocks = [ctypes.create_string_buffer(b"x" * 60_000, 60_001) for _ in range(1000)]
    full = process_memory(os.getpid())
    last = blocks.pop()
    blocks.clear()
    trim_heap()
    left = process_memory(os.getpid())
    assert full is not None
    assert left is not None
    assert full - left > 40 << 20
    assert last.value.startswith(b"x")
