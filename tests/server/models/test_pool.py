"""Several models in one server: loading when named, unloading, waiting, failing. No process is started."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadFile, EngineLost, InvalidField, ModelNotFound, QueueFull
from plait.server.http.errors import ModelUnavailable, NotReady
from plait.server.models import residents as residents_module
from plait.server.models.hosted import FIRST_PAUSE_S
from plait.server.models.placement import PATIENCE_S, RESIDENCE_S, YIELD_S
from plait.server.models.pool import FOLLOW_EVERY_S
from tests import patience
from tests.server.models.pooling import SIZE, Bench


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), patience.PATIENCE_S))


def test_a_model_is_loaded_when_a_request_names_it() -> None:
    async def check() -> None:
        bench = Bench("small", "big", aliases={"big": ("gpt-4",)})
        bench.pool.begin()
        await bench.until(lambda: bench.loaded() == {"small"})
        assert await bench.answer("gpt-4") == "big"
        assert [await bench.answer(name) for name in (None, "default", "small:latest")] == ["small"] * 3
        assert sorted(bench.loader.loaded) == ["big", "small"]
        bench.pool.close()

    run(check)


@pytest.mark.parametrize("name", ["../../etc/passwd", "small/../big", "/", "big\0", "x" * 200, ""])
def test_an_unknown_name_is_never_a_path(name: str) -> None:
    async def check() -> None:
        bench = Bench("small")
        with pytest.raises(ModelNotFound, match="'small'"):
            await bench.use(name)
        with pytest.raises(InvalidField):
            await bench.use(["small"])
        assert bench.loader.loaded == []

    run(check)


def test_the_idle_model_used_longest_ago_makes_place_and_a_busy_one_stays() -> None:
    async def check() -> None:
        bench = Bench("a", "b", "c", fit=2)
        held = await bench.use("a")
        await bench.answer("b")
        await bench.later(RESIDENCE_S)
        assert await bench.answer("c") == "c"
        assert bench.loaded() == {"a", "c"}
        assert held.release is not None
        held.release()
        await bench.later(RESIDENCE_S)
        await bench.answer("c")
        await bench.answer("b")
        assert bench.loaded() == {"b", "c"}
        bench.pool.close()

    run(check)


def test_a_model_stays_for_a_time_after_it_was_loaded_so_loads_are_no_storm() -> None:
    async def check() -> None:
        bench = Bench("a", "b", fit=1)
        await bench.answer("a", keep_alive=0)
        waiting = [asyncio.ensure_future(bench.answer("b")) for _ in range(20)]
        await bench.until(lambda: bool(bench.residents.queue))
        await bench.later(RESIDENCE_S - 1)
        assert bench.loaded() == {"a"}
        await bench.later(1.0)
        assert await asyncio.gather(*waiting) == ["b"] * 20
        assert bench.loader.loaded == ["a", "b"]
        bench.pool.close()

    run(check)


def test_a_model_that_is_always_busy_yields_after_a_while_and_its_requests_end_first() -> None:
    async def check() -> None:
        bench = Bench("a", "b", fit=1)
        held = await bench.use("a")
        waits_for_b = asyncio.ensure_future(bench.answer("b"))
        await bench.until(lambda: bool(bench.residents.queue))
        await bench.later(PATIENCE_S - 1)
        assert await bench.answer("a") == "a"
        await bench.later(1.0)
        waits_for_a = asyncio.ensure_future(bench.answer("a"))
        await asyncio.sleep(0.01)
        assert bench.loaded() == {"a"}
        assert not waits_for_a.done()
        assert held.release is not None
        held.release()
        assert await waits_for_b == "b"
        await bench.later(RESIDENCE_S)
        assert await waits_for_a == "a"
        bench.pool.close()

    run(check)


def test_one_long_stream_keeps_other_requests_of_its_model_waiting_for_a_bounded_time() -> None:
    async def check() -> None:
        bench = Bench("a", "b", fit=1)
        long_stream = await bench.use("a")
        waits_for_b = asyncio.ensure_future(bench.answer("b"))
        await bench.until(lambda: bool(bench.residents.queue))
        await bench.later(PATIENCE_S)
        waits_for_a = asyncio.ensure_future(bench.answer("a"))
        await asyncio.sleep(0.01)
        assert not waits_for_a.done()
        await bench.later(YIELD_S)
        assert await waits_for_a == "a"
        assert await bench.answer("a") == "a"
        assert long_stream.release is not None
        long_stream.release()
        assert await waits_for_b == "b"
        bench.pool.close()

    run(check)


def test_an_idle_model_is_unloaded_after_its_time_and_its_text_side_is_forgotten() -> None:
    async def check() -> None:
        bench = Bench("a", "b", keep_alive="1m")
        await bench.answer("a")
        await bench.answer("b", keep_alive="2h")
        front = weakref.ref(bench.loader.fronts[0])
        bench.loader.fronts.clear()
        assert bench.pool.facts_of("a").expires is not None
        await bench.later(59)
        assert bench.loaded() == {"a", "b"}
        await bench.later(2)
        assert bench.loaded() == {"b"}
        gc.collect()
        assert front() is None
        known = bench.pool.facts_of("a")
        assert (known.stage, known.max_model_len, known.front) == ("unloaded", 2048, None)
        await bench.later(7200)
        assert bench.loaded() == set()
        bench.pool.close()

    run(check)


@pytest.mark.parametrize(("keep", "seconds"), [(0, RESIDENCE_S), ("10s", 10), (-1, None), ("-1m", None)])
def test_keep_alive_of_a_request(keep: object, seconds: float | None) -> None:
    async def check() -> None:
        bench = Bench("a")
        await bench.answer("a", keep_alive=keep)
        if seconds is None:
            await bench.later(1e9)
            assert bench.loaded() == {"a"}
        else:
            await bench.later(seconds - 0.5)
            assert bench.loaded() == {"a"}
            await bench.later(0.5)
            assert bench.loaded() == set()
        with pytest.raises(InvalidField, match="keep_alive"):
            await bench.use("a", keep_alive="soon")
        bench.pool.close()

    run(check)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    async def check() -> None:
        bench = Bench("a", "huge", fit=1, sizes={"huge": 40 * SIZE})
        with pytest.raises(ModelUnavailable, match=r"about 4656 MiB and all models may take 366 MiB"):
            await bench.use("huge")
        assert await bench.answer("a") == "a"
        assert bench.loader.loaded == ["a"]
        bench.pool.close()

    run(check)


def test_a_failed_load_answers_its_cause_and_is_not_tried_again_at_once() -> None:
    async def check() -> None:
        bench = Bench("a", "bad")
        await bench.answer("a")
        bench.loader.broken["bad"] = BadFile("bad.gguf is truncated")
        found = await asyncio.gather(*(bench.use("bad") for _ in range(5)), return_exceptions=True)
        assert all(isinstance(one, ModelUnavailable) and "truncated" in str(one) for one in found)
        for _ in range(5):
            with pytest.raises(ModelUnavailable, match="truncated"):
                await bench.use("bad")
        assert bench.loader.loaded == ["a", "bad"]
        assert bench.pool.facts_of("bad").stage == "failed"
        pauses = []
        for _ in range(8):
            model = bench.residents.models["bad"]
            assert model.failure is not None
            pauses.append(model.failure.until_s - bench.clock.now)
            bench.clock.now = model.failure.until_s
            with pytest.raises(ModelUnavailable):
                await bench.use("bad")
        assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]
        assert bench.pool.fault is None
        bench.loader.broken.clear()
        await bench.pool.load("bad")  # an operator need not wait
        assert await bench.answer("bad") == "bad"
        bench.pool.close()

    run(check)


def test_the_first_model_ends_the_server_if_it_cannot_be_loaded_at_startup() -> None:
    async def check() -> None:
        bench = Bench("a", "b")
        bench.loader.broken["a"] = BadFile("a is truncated")
        bench.pool.begin()
        assert bench.pool.readiness() == (503, "loading")
        await bench.until(lambda: bench.pool.fault is not None)
        assert str(bench.pool.fault) == "a is truncated"
        bench.pool.close()

    run(check)


def test_a_lost_engine_harms_no_other_model() -> None:
    async def check() -> None:
        bench = Bench("a", "b")
        bench.pool.begin()
        await bench.answer("a")
        exchange = await bench.use("b")
        bench.loader.fronts[1].loop.fault = EngineLost("it ended again and again")  # type: ignore[misc]
        with pytest.raises(ModelUnavailable, match="again and again"):
            await bench.use("b")
        await bench.later(1)
        assert bench.loaded() == {"a"}
        assert (bench.pool.fault, bench.pool.readiness()) == (None, (200, "ready"))
        assert exchange.release is not None
        exchange.release()
        bench.clock.now += 5
        assert await bench.answer("b") == "b"
        assert bench.residents.models["b"].num_users == 0
        bench.pool.close()

    run(check)


def test_requests_wait_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents_module, "MAX_WAITING", 3)
    monkeypatch.setattr(residents_module, "MAX_QUEUED", 1)
    monkeypatch.setattr(residents_module, "WAIT_S", 20.0)

    async def check() -> None:
        loop = asyncio.get_running_loop()
        bench = Bench("a", "b", "c", fit=1)
        bench.loader.held.add("a")
        waiting = [asyncio.ensure_future(bench.use("a")) for _ in range(3)]
        await bench.until(lambda: len(bench.residents.models["a"].waiters) == 3)
        with pytest.raises(QueueFull, match="3 requests wait"):
            await bench.use("a")
        other = asyncio.ensure_future(bench.use("b"))
        await bench.until(lambda: bool(bench.residents.queue))
        with pytest.raises(QueueFull, match="1 models wait"):
            await bench.use("c")
        now = loop.time() + 20.0
        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda: now)
            found = await asyncio.gather(*waiting, other, return_exceptions=True)
        assert all(isinstance(one, NotReady) and "within 20 s" in str(one) for one in found)
        assert bench.residents.queue == []
        bench.loader.held.clear()
        await bench.until(lambda: bench.loaded() == {"a"})
        assert bench.residents.models["a"].num_users == 0
        bench.pool.close()

    run(check)


def test_a_client_that_leaves_while_it_waits_holds_nothing() -> None:
    async def check() -> None:
        bench = Bench("a")
        bench.loader.held.add("a")
        waiting = asyncio.ensure_future(bench.use("a"))
        await bench.until(lambda: bench.phases()["a"] == "loading")
        bench.loader.held.clear()
        model = bench.residents.models["a"]
        await bench.until(lambda: model.num_users == 1 or waiting.done())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if not waiting.cancelled():  # it was served first
            exchange = waiting.result()
            assert exchange.release is not None
            exchange.release()
        assert model.num_users == 0
        bench.pool.close()

    run(check)


def test_unload_waits_for_open_requests_and_cancels_a_load() -> None:
    async def check() -> None:
        bench = Bench("a", "b")
        held = await bench.use("a")
        await bench.pool.unload("a")
        assert bench.loaded() == {"a"}
        again = asyncio.ensure_future(bench.answer("a"))  # it comes after: it has the model loaded again
        await asyncio.sleep(0.01)
        assert held.release is not None
        held.release()
        assert await again == "a"
        assert bench.loader.loaded == ["a", "a"]
        bench.loader.held.add("b")
        assert (await bench.pool.load("b")).stage == "loading"
        await bench.until(lambda: bench.phases()["b"] == "loading")
        await bench.pool.unload("b")
        await bench.until(lambda: bench.phases()["b"] == "unloaded")
        assert bench.pool.facts_of("b").stage == "unloaded"
        bench.pool.close()

    run(check)


def unloads(bench: Bench) -> dict[tuple[str, str], float]:
    """Counts by (model, reason)."""
    found = bench.residents.metrics.registry.collect()
    samples = [one for metric in found for one in metric.samples if one.name == "plait_model_unloads_total"]
    return {(one.labels["model"], one.labels["reason"]): one.value for one in samples}


def test_the_metric_says_why_a_model_was_unloaded() -> None:
    async def check() -> None:
        bench = Bench("a", "b", "c", fit=2)
        held = await bench.use("a")
        await bench.pool.unload("a")
        assert held.release is not None
        held.release()
        await bench.until(lambda: bench.phases()["a"] == "unloaded")
        await bench.answer("b", keep_alive=0)
        await bench.later(RESIDENCE_S)
        assert unloads(bench) == {("a", "requested"): 1, ("b", "idle"): 1}
        bench.pool.close()

    run(check)


def test_a_model_with_other_files_is_another_model(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "m.gguf"
        file.write_text("one")
        sizes = {"m": SIZE}
        bench = Bench(folder=tmp_path, sizes=sizes, fit=4)
        bench.pool.begin()
        bench.loader.broken["m"] = BadFile("m.gguf is truncated")
        with pytest.raises(ModelUnavailable, match="truncated"):
            await bench.answer("m")
        del bench.loader.broken["m"]
        bench.clock.now += FIRST_PAUSE_S - 1  # the same files: the next attempt still has to wait
        bench.pool.look_around()
        with pytest.raises(ModelUnavailable, match="truncated"):
            await bench.answer("m")

        async def replace(text: str, nbytes: int) -> None:
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(file)
            sizes["m"] = nbytes
            bench.clock.now += FOLLOW_EVERY_S
            before = bench.residents.models["m"].entry.stamp
            bench.pool.look_around()
            await bench.until(lambda: bench.residents.models["m"].entry.stamp != before)
            await bench.until(lambda: bench.pool.facts_of("m").size == nbytes)

        await replace("whole", 2 * SIZE)
        held = await bench.use("m")  # at once: what failed were other files
        need = bench.pool.facts_of("m").memory
        await replace("again", 3 * SIZE)
        later = asyncio.ensure_future(bench.answer("m"))
        await asyncio.sleep(0.01)
        assert bench.loaded() == {"m"}
        assert not later.done()  # it is for the files that are there now
        assert held.release is not None
        held.release()
        assert await later == "m"
        assert bench.loader.loaded == ["m"] * 3
        assert unloads(bench) == {("m", "files"): 1}
        assert (bench.pool.facts_of("m").memory or 0) > (need or 0)
        bench.pool.close()

    run(check)


def test_at_most_so_many_models_are_loaded() -> None:
    async def check() -> None:
        bench = Bench("a", "b", fit=9, max_loaded_models=1)
        await bench.answer("a")
        await bench.later(RESIDENCE_S)
        await bench.answer("b")
        assert bench.loaded() == {"b"}
        bench.pool.close()

    run(check)


def test_stopping_ends_what_waits_and_what_loads() -> None:
    async def check() -> None:
        bench = Bench("a", "b")
        await bench.answer("a")
        bench.loader.held.add("b")
        waiting = asyncio.ensure_future(bench.use("b"))
        await bench.until(lambda: bench.phases()["b"] == "loading")
        bench.pool.stop()
        with pytest.raises(NotReady, match="stopping"):
            await waiting
        with pytest.raises(NotReady, match="stopping"):
            await bench.use("a")
        await asyncio.to_thread(bench.pool.close)
        assert not bench.loader.fronts[0].healthy

    run(check)
