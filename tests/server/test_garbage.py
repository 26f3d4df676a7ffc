"""What a server loads is not looked at again by collections, and is freed when it is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from plait.server.garbage import drop_unloaded, keep_loaded


class _Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_collections_look_at_what_came_later() -> None:
    loaded = [[number] for number in range(1000)]
    keep_loaded()
    later = [len(loaded)]
    looked_at = {id(one) for one in gc.get_objects()}
    assert not looked_at & {id(one) for one in loaded}
    assert id(later) in looked_at


def test_a_circle_that_was_kept_is_freed_when_it_is_dropped() -> None:
    circle = _Circle()
    gone = weakref.ref(circle)
    keep_loaded()
    del circle
    gc.collect()
    assert gone() is not None
    drop_unloaded()
    assert gone() is None
