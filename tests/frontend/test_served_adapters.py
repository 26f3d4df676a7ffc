"""Names of adapters, as the engine has them: after refusals, and with changes that come together."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from plait.errors import EngineRestarting, InvalidField, ModelNotFound, PlaitError
from plait.frontend.loop import Loop
from plait.frontend.served_adapters import ServedAdapters
from tests.patience import PATIENCE_S, until


class Engine:
    """Has adapters, or raises `error` for each change. A change of `held` waits until `goes_on`."""

    def __init__(self, *names: str) -> None:
        self.names, self.held = set(names), ""
        self.error: PlaitError | None = None
        self.goes_on, self.waits = threading.Event(), False

    def change_adapter(self, name: str, path: str | None) -> None:
        if self.error is not None:
            raise self.error
        (self.names.discard if path is None else self.names.add)(name)
        if name == self.held:  # the engine has made the change, and its requester does not know yet
            self.waits = True
            assert self.goes_on.wait(PATIENCE_S)


def served_by(engine: Engine) -> ServedAdapters:
    return ServedAdapters(cast("Loop", engine), [f"{name}=path" for name in sorted(engine.names)])


def test_an_adapter_that_could_not_be_unloaded_now_keeps_its_name() -> None:
    engine = Engine("a", "b")
    served = served_by(engine)
    engine.error = EngineRestarting("another engine is loading")
    with pytest.raises(EngineRestarting):
        served.unload("a")
    with pytest.raises(EngineRestarting):
        served.load("c", "c")
    assert {*served.paths} == engine.names == {"a", "b"}
    engine.error = None
    served.unload("a")
    assert {*served.paths} == engine.names == {"b"}


def test_an_adapter_that_the_engine_has_not_loses_its_name() -> None:
    engine = Engine("a")
    served = served_by(engine)
    engine.error = ModelNotFound("the adapter 'a' is not loaded here", "model")
    with pytest.raises(ModelNotFound):
        served.unload("a")
    assert not served.paths


def test_a_name_that_no_request_could_send_is_refused_before_the_engine() -> None:
    engine = Engine()
    with pytest.raises(InvalidField, match="letters"):
        served_by(engine).load("a b", "a")
    assert not engine.names


def test_changes_that_come_together_leave_the_names_that_the_engine_has() -> None:
    """The thread of a load that goes on late must not bring back what was unloaded meanwhile."""
    engine = Engine("b")
    served = served_by(engine)
    engine.held = "a"
    load = threading.Thread(target=served.load, args=("a", "path"))
    load.start()
    until(lambda: engine.waits)
    engine.held = ""
    unload = threading.Thread(target=served.unload, args=("a",))
    unload.start()
    unload.join(0.05)
    engine.goes_on.set()
    load.join()
    unload.join()
    assert {*served.paths} == engine.names == {"b"}
