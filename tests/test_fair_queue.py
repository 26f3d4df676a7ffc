"""A fair queue: keys with many requests do not keep others waiting."""

from __future__ import annotations

import threading

import pytest

from plait.errors import CapacityError
from plait.fair_queue import FairQueue, Turns, current_client


def test_askers_take_turns_and_each_keeps_its_own_order() -> None:
    queue = FairQueue[int](each=9)
    for who, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5)):
        queue.put(who, item)
    assert [queue.take() for _ in range(6)] == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("a", 3), None]


def test_an_asker_has_no_more_in_work_than_its_share() -> None:
    queue = FairQueue[int](each=1)
    for who, item in (("a", 1), ("a", 2), ("b", 3)):
        queue.put(who, item)
    assert [queue.take(), queue.take(), queue.take()] == [("a", 1), ("b", 3), None]
    queue.end_work("a")
    assert queue.take() == ("a", 2)


def test_what_is_dropped_is_never_taken() -> None:
    queue = FairQueue[int](each=1)
    queue.put("a", 1)
    queue.put("a", 2)
    queue.drop("a", 1)
    assert queue.take() == ("a", 2)


def test_one_asker_leaves_a_place_to_others() -> None:
    turns = Turns(places=2, each=1)
    with turns.take(0, "none free") as first:
        with pytest.raises(CapacityError, match="none free"), turns.take(0.01, "none free"):
            pass
        token = current_client.set("another")
        try:
            with turns.take(0, "none free") as second:
                assert (first, second) == (0, 1)
        finally:
            current_client.reset(token)
    with turns.take(0, "none free") as again:
        assert again == 0


def test_place_that_becomes_free_goes_to_a_waiting_client() -> None:
    turns, order = Turns(places=1, each=1), list[str]()
    waiting = threading.Semaphore(0)

    def work(who: str) -> None:
        current_client.set(who)
        waiting.release()
        with turns.take(30, "late"):
            order.append(who)

    with turns.take(0, "late"):
        threads = [threading.Thread(target=work, args=(who,)) for who in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for _ in threads:
            waiting.acquire()
    for thread in threads:
        thread.join()
    assert sorted(order) == ["a", "b", "c"]
