"""What an engine that follows another is sent, so that it has the same adapters."""

from __future__ import annotations

from plait.errors import EngineRestarting, InvalidField
from plait.worker import protocol
from plait.worker.adapter_changes import AdapterChanges


def change(changes: AdapterChanges, name: str, path: str | None, error: InvalidField | None = None) -> None:
    """Have an engine make a change, or refuse it."""
    number = len(name) + 7
    sent = changes.send(number, name, path)
    assert (sent.number, sent.name, sent.path) == (number, name, path)
    changes.read(protocol.AdapterChanged(number, error))


def restored(changes: AdapterChanges) -> list[tuple[str, str | None]]:
    sent: list[protocol.ChangeAdapter] = []
    changes.restore(sent.append)
    assert all(message.number == 0 for message in sent)  # no requester waits for them
    return [(message.name, message.path) for message in sent]


def test_only_changes_that_the_engine_made_are_restored() -> None:
    changes = AdapterChanges()
    change(changes, "a", "folder/a")
    change(changes, "b", "nowhere", InvalidField("it is bad", "lora_path"))
    changes.send(3, "c", "folder/c")
    changes.read(protocol.ProgressReport("loading", 0, 1))
    assert restored(changes) == [("a", "folder/a")]


def test_places_are_freed_before_adapters_are_loaded() -> None:
    """With two places and `a` and `b` at startup, `x` would find no place before `b` is unloaded."""
    changes = AdapterChanges()
    for name, path in (("a", None), ("x", "x"), ("x", None), ("b", None), ("a", "other"), ("x", "x")):
        change(changes, name, path)
    assert restored(changes) == [("b", None), ("a", "other"), ("x", "x")]


def test_a_change_while_no_engine_is_up_is_refused_for_now() -> None:
    refusal = AdapterChanges().refuse(5)
    assert refusal.number == 5
    assert isinstance(refusal.error, EngineRestarting)
    assert refusal.error.status == 503
