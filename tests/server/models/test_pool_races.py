"""A pool of which the folder changes, and the operator's word, while something else goes on. No timing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from plait.errors import ModelNotFound
from plait.server.models.catalog import ModelEntry
from plait.server.models.file_facts import FileFacts
from plait.server.models.pool import FOLLOW_EVERY_S
from tests.patience import PATIENCE_S
from tests.server.models.pooling import Bench
from tests.server.models.test_pool import run


async def look(bench: Bench) -> None:
    """Have the pool look at its folder, and wait until it has."""
    bench.clock.now += FOLLOW_EVERY_S
    bench.pool.look_around()
    assert bench.pool._scan is not None
    await bench.pool._scan


def test_a_load_that_follows_an_unload_at_once_is_made() -> None:
    async def check() -> None:
        bench = Bench("a", "b")
        bench.loader.held.add("b")
        await bench.pool.load("b")
        await bench.until(lambda: bench.loader.loaded == ["b"])
        await bench.pool.unload("b")
        facts = await bench.pool.load("b")  # the load before it has not ended yet
        assert facts.stage == "loading"
        bench.loader.held.clear()
        await bench.until(lambda: bench.loaded() == {"b"})
        bench.pool.close()

    run(check)


def test_a_request_for_a_model_that_vanishes_before_it_is_loaded_waits_no_longer(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "m.gguf"
        file.write_text("one")
        bench = Bench("a", folder=tmp_path, fit=1)
        held = await bench.use("a")
        waiting = asyncio.ensure_future(bench.use("m"))
        await bench.until(lambda: bool(bench.residents.queue))
        file.unlink()
        await look(bench)
        with pytest.raises(ModelNotFound, match="no longer in the models' folder"):
            await waiting
        file.write_text("two")
        await look(bench)
        assert held.release is not None
        held.release()
        assert bench.residents.queue == []
        assert bench.loader.loaded == ["a"], "what has vanished is not loaded behind the pool's back"
        bench.pool.close()

    run(check)


def test_a_request_for_a_model_that_vanishes_while_it_is_unloaded_waits_no_longer(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "m.gguf"
        file.write_text("one")
        bench = Bench(folder=tmp_path)
        held = await bench.use("m")
        await bench.pool.unload("m")
        waiting = asyncio.ensure_future(bench.use("m"))  # until it was loaded again
        await bench.until(lambda: bool(bench.residents.queue))
        file.unlink()
        await look(bench)
        assert held.release is not None
        held.release()
        with pytest.raises(ModelNotFound, match="no longer in the models' folder"):
            await waiting
        assert (bench.residents.queue, bench.phases(), bench.loader.loaded) == ([], {}, ["m"])
        bench.pool.close()

    run(check)


def test_what_was_read_of_files_that_are_no_longer_there_does_not_count(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "m.gguf"
        file.write_text("one")
        bench = Bench(folder=tmp_path)
        reads, may_go = threading.Event(), threading.Event()

        def read_files(entry: ModelEntry) -> FileFacts:
            found = FileFacts(own_name="m", size=len(file.read_text()))
            if not reads.is_set():
                reads.set()
                assert may_go.wait(PATIENCE_S)
            return found

        bench.residents._read_files = read_files
        bench.pool.begin()
        await bench.until(reads.is_set)
        (tmp_path / "new").write_text("larger")
        (tmp_path / "new").rename(file)
        await look(bench)
        assert bench.pool.facts_of("m").size == len("larger")
        may_go.set()
        await bench.pool._learning
        assert bench.pool.facts_of("m").size == len("larger")
        bench.pool.close()

    run(check)
