from __future__ import annotations

import select
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from plait.config import EngineConfig
from plait.worker import supervisor as module
from plait.worker.child_process import End
from plait.worker.protocol import Hello, Ready
from plait.worker.supervisor import Mailbox, Patience, Supervisor


def overdue(supervisor: Supervisor, alive_s: float, busy_since_s: float = 0.0) -> str | None:
    status: Any = SimpleNamespace(alive_s=alive_s, busy_since_s=busy_since_s)
    return supervisor._overdue(SimpleNamespace(status=status))  # type: ignore[arg-type]


def test_supervisor_that_was_stopped_itself_does_not_blame_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    patience = Patience(frozen_s=1.0, stalled_s=1.0, loading_s=1e9)
    supervisor = Supervisor(Hello("a:b", "m", EngineConfig(), {}), None, patience)  # type: ignore[arg-type]
    long_ago = now[0] - 100
    assert overdue(supervisor, long_ago, long_ago) is None  # the first look for a long time
    now[0] += 1.1
    assert "no thread of it has run" in (overdue(supervisor, long_ago) or "")
    assert overdue(supervisor, now[0]) is None
    supervisor._up_since = long_ago
    assert "a step has taken more than" in (overdue(supervisor, now[0], long_ago) or "")
    supervisor._looked_s = long_ago
    assert overdue(supervisor, long_ago, long_ago) is None
    supervisor.mailbox.close()


@pytest.mark.parametrize(("is_killed", "image"), [(True, "auto"), (False, "off")])
def test_after_a_crash_no_startup_image_is_used(
    is_killed: bool, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong image would end the next engine, too. One that was killed from outside was not at fault."""
    images: list[str] = []

    def spawned(hello: Hello, *_: object) -> Any:
        images.append(hello.config.startup_image)
        end = End("it was ended", is_killed=is_killed, is_oom=False)
        return SimpleNamespace(end=lambda timeout_s: end, status=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(module, "Spawned", spawned)
    watcher: Any = SimpleNamespace(on_down=lambda: None)
    supervisor = Supervisor(Hello("a:b", "m", EngineConfig(), {}), watcher, Patience())
    monkeypatch.setattr(supervisor, "_attend", lambda engine: module.GONE)
    monkeypatch.setattr(supervisor, "_record_end", lambda engine: None)
    supervisor._live()
    supervisor._live()
    assert images == ["auto", image]
    supervisor.mailbox.close()


@pytest.mark.parametrize(("requested", "is_on_gpu", "device"), [
    ("auto", True, "cuda"), ("auto", False, "auto"), ("cuda:1", True, "cuda:1"), ("cpu", False, "cpu"),
])  # fmt: skip
def test_an_engine_that_was_on_a_gpu_is_followed_by_none_on_a_cpu(
    requested: str, is_on_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that falls off its bus is found no more: "auto" went on with a hundredth of the speed."""
    devices: list[str] = []

    def spawned(hello: Hello, *_: object) -> Any:
        devices.append(hello.config.device)
        end = End("it exited with code 1")
        status = SimpleNamespace(close=lambda: None)
        return SimpleNamespace(end=lambda timeout_s: end, status=status, send=id, pid=1)

    def attend(engine: Any) -> str:
        supervisor._handle(engine, Ready(None, 64, 64, (), device_nbytes=64 if is_on_gpu else 0))
        return module.GONE

    monkeypatch.setattr(module, "Spawned", spawned)
    watcher: Any = SimpleNamespace(on_down=lambda: None, on_up=lambda engine, ready: None)
    supervisor = Supervisor(Hello("a:b", "m", EngineConfig(device=requested), {}), watcher, Patience())
    for name, fake in (("_attend", attend), ("_record_end", id), ("send_log_levels", lambda: None)):
        monkeypatch.setattr(supervisor, name, fake)
    monkeypatch.setattr(module.AdapterChanges, "restore", lambda *_: None)
    supervisor._live()
    supervisor._live()
    assert devices == [requested, device]
    supervisor.mailbox.close()


def test_a_mailbox_takes_commands_until_it_is_closed_and_loses_none() -> None:
    mailbox, done = Mailbox(), []
    for i in range(70_000):  # more than its pipe holds
        assert mailbox.put(lambda _, i=i: done.append(i))  # type: ignore[misc]
    assert len(mailbox.take()) == 70_000
    assert not select.select([mailbox.fd], [], [], 0)[0]  # nothing wakes its thread again
    assert not mailbox.take()
    assert mailbox.put(lambda _: None)
    assert select.select([mailbox.fd], [], [], 0)[0]
    assert len(mailbox.close()) == 1
    assert not mailbox.put(lambda _: None)


def test_a_process_that_cannot_be_started_is_tried_again_with_pauses_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine without memory for a process made the supervisor spin, deaf to everything."""
    starts: list[float] = []

    def spawned(*_: object) -> None:
        starts.append(time.monotonic())
        raise OSError("Cannot allocate memory")

    ended: list[object] = []
    monkeypatch.setattr(module, "Spawned", spawned)
    monkeypatch.setattr(module, "BACKOFF_S", 0.02)
    watcher: Any = SimpleNamespace(on_down=lambda: None, on_end=ended.append, on_restart=lambda: None)
    supervisor = Supervisor(Hello("a:b", "m", EngineConfig(), {}), watcher, Patience())
    supervisor._was_up = True
    supervisor.run()
    assert len(starts) == module.MAX_DEATHS
    assert all(later - earlier > 0.01 for earlier, later in pairwise(starts))
