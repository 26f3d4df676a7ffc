"""A conversation goes on in another process from the disk, with the same tokens, for every kind of state."""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading.build import load
from plait.loading.image.start import load_image
from plait.request import Request, SamplingParams
from plait.state.disk import cache as cache_module
from tests.families import tiny

BLOCK, LONGEST = 16, 512
SIZES = {"device": "cpu", "threads": 1, "max_num_seqs": 2, "max_model_len": LONGEST, "block_size": BLOCK}
DRAWN = SamplingParams(temperature=0.8, seed=7, max_tokens=7)


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    num_cached: int
    stats: Mapping[str, int]
    causes: Mapping[str, int]
    by_slots: bool


def ask(model: Path, history: list[int], salt: str = "", **options: object) -> Reply:
    """What a new engine replies, which is then closed."""
    config = EngineConfig(**{**SIZES, "startup_image": "off", **options})  # type: ignore[arg-type]
    loaded = load_image(str(model), config) or load(str(model), config)
    engine = loaded.front.loop.engine  # type: ignore[attr-defined]
    try:
        stream = loaded.front.submit(Request("one", tuple(history), DRAWN, cache_salt=salt))
        reply = [token_id for delta in stream for token_id in delta.token_ids]
        trace = stream.trace(0)
        engine_memory = engine.scheduler.memory
    finally:
        loaded.front.close()
    engine.scheduler.check()
    assert trace is not None
    counts = dict(engine.scheduler.cache_counts)
    return Reply(reply, trace.num_cached_tokens, engine.stats(), counts, engine_memory.has_slots)


def words(seed: int, count: int) -> list[int]:
    luck = random.Random(seed)
    return [luck.randrange(3, 97) for _ in range(count)]


def go_on(model: Path, disk: Path, **options: object) -> None:
    """Three turns, each in an engine of its own, and each also in one that knows nothing."""
    history: list[int] = []
    for turn in range(3):
        history += words(turn, 45)
        known, plain = ask(model, history, cache_disk=str(disk), **options), ask(model, history, **options)
        assert known.token_ids == plain.token_ids
        computed = len(history) - known.num_cached
        if turn:
            assert computed <= 45 + 1 + (0 if known.by_slots else BLOCK - 1)
            assert known.causes["hit"] == 1
        history += known.token_ids


def test_a_conversation_goes_on_in_another_engine(nano_hybrid: Path, tmp_path: Path) -> None:
    """The hybrid of the repository: latents, Mamba2 snapshots, experts."""
    first = words(0, 45)
    reply = ask(nano_hybrid, first, cache_disk=str(tmp_path / "kept"))
    assert reply.stats["num_disk_written"] >= 3
    history = [*first, *reply.token_ids, *words(1, 20)]
    known = ask(nano_hybrid, history, cache_disk=str(tmp_path / "kept"))
    plain = ask(nano_hybrid, history)
    assert known.token_ids == plain.token_ids
    assert known.num_cached == len(first) + len(reply.token_ids) - 1
    assert "disk_nbytes" not in plain.stats
    other = ask(nano_hybrid, history, "another tenant", cache_disk=str(tmp_path / "kept"))
    assert other.num_cached == 0
    assert other.causes["new"] == 1


def test_files_that_were_changed_are_a_miss_with_a_cause(
    nano_hybrid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = words(0, 45)
    before = ask(nano_hybrid, history, cache_disk=str(tmp_path / "kept"))
    for path in (tmp_path / "kept").rglob("*.state"):
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
    caplog.clear()
    again = ask(nano_hybrid, history, cache_disk=str(tmp_path / "kept"))
    assert again.token_ids == before.token_ids
    assert again.num_cached == 0
    assert again.causes["disk"] == 1
    assert again.stats["num_disk_damaged"] >= 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if text.startswith("disk cache")]) == 1, "others: a busy machine"
    assert ask(nano_hybrid, history, cache_disk=str(tmp_path / "kept")).num_cached == len(history) - 1


def test_a_folder_that_others_may_write_is_refused(nano_hybrid: Path, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        ask(nano_hybrid, words(0, 5), cache_disk=str(folder))


def test_a_file_in_place_of_a_folder_is_refused(nano_hybrid: Path, tmp_path: Path) -> None:
    (file := tmp_path / "kept").write_text("notes")
    with pytest.raises(ConfigError, match=r"cache_disk: .*kept is a file; name a folder"):
        ask(nano_hybrid, words(0, 5), cache_disk=str(file))


def test_options_that_cannot_work_with_it_are_refused() -> None:
    for options in ({"prefix_cache": False}, {"device": "cuda"}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="cache_disk"):
            EngineConfig(cache_disk="somewhere", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cache_disk_limit"):
        EngineConfig(cache_disk_limit=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba2", "bamba", "granite"])
def test_every_kind_of_state_comes_back(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path / name)
    longer = () if name == "mamba2" else (f"max_position_embeddings={LONGEST}",)
    go_on(tmp_path / name, tmp_path / "kept", set=longer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"speculate": "ngram"}, {"precise": True}])
def test_state_comes_back_with_other_options(
    options: dict[str, object], nano_hybrid: Path, tmp_path: Path
) -> None:
    go_on(nano_hybrid, tmp_path / "kept", **options)


SCRIPT = """
import json, sys
from plait import LLM, SamplingParams

with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    out = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0.8, seed=7, max_tokens=7))[0]
    found = [list(out.outputs[0].token_ids), out.num_cached_tokens, "image" in llm.step_kind]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_an_image_and_the_whole_model_share_what_they_keep(
    nano_hybrid: Path, tmp_path: Path, kernel_folder: Path
) -> None:
    model, cache = Path(shutil.copytree(nano_hybrid, tmp_path / "model")), tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernel_folder)

    def reply(history: list[int], **options: object) -> tuple[list[int], int, bool]:
        given = json.dumps({**SIZES, "cache_dir": str(cache), **options})
        command = [sys.executable, "-c", SCRIPT, str(model), given, json.dumps([history])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        token_ids, num_cached, by_image = json.loads(done.stdout.splitlines()[-1])
        return token_ids, num_cached, by_image

    kept, history = str(tmp_path / "kept"), words(0, 45)
    for startup, by_image in (("auto", False), ("auto", True), ("off", False), ("auto", True)):
        token_ids, num_cached, is_image = reply(history, cache_disk=kept, startup_image=startup)
        assert is_image is by_image
        assert token_ids == reply(history, startup_image="off")[0]
        assert num_cached == (len(history) - 21 if len(history) > 45 else 0)
        history += [*token_ids, *words(1, 20)]


def test_other_kernels_read_nothing_of_these(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, prompt = {"cache_disk": str(tmp_path / "disk")}, words(1, 60)
    ask(nano_hybrid, prompt, **disk)
    assert ask(nano_hybrid, prompt, **disk).num_cached
    monkeypatch.setattr("plait.loading.identity.fingerprint.hash_code", lambda parts: "other kernels")
    assert not ask(nano_hybrid, prompt, **disk).num_cached
    assert len(list((tmp_path / "disk").iterdir())) == 2


def chat(
    model: Path, folder: Path, histories: list[list[int]], between: Callable[[int], None]
) -> list[Reply]:
    """Requests in one engine with a disk cache, one after the other; `between` runs before each."""
    found = []
    config = EngineConfig(**{**SIZES, "startup_image": "off", "cache_disk": str(folder)})  # type: ignore[arg-type]
    loaded = load(str(model), config)
    engine = loaded.front.loop.engine  # type: ignore[attr-defined]
    try:
        for number, history in enumerate(histories):
            between(number)
            stream = loaded.front.submit(Request(str(number), tuple(history), DRAWN))
            reply = [token_id for delta in stream for token_id in delta.token_ids]
            trace = stream.trace(0)
            assert trace is not None
            found.append(Reply(reply, trace.num_cached_tokens, engine.stats(), {}, True))
    finally:
        loaded.front.close()
    engine.scheduler.check()
    return found


def test_a_disk_that_takes_100_ms_for_each_read_changes_no_reply(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = [words(seed, 45) for seed in range(3)]
    plain = [ask(nano_hybrid, history) for history in histories]
    for history in histories:
        ask(nano_hybrid, history, cache_disk=str(tmp_path / "kept"))
    real = cache_module.read_content

    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return real(*given)

    monkeypatch.setattr(cache_module, "read_content", slow)
    found = chat(nano_hybrid, tmp_path / "kept", histories, lambda number: None)
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in plain]
    assert found[0].num_cached  # no step is measured before it, so it waits
    # The others wait as long as their tokens take to compute: where that is less, they are computed.
    assert found[-1].stats["num_disk_late"] == sum(not reply.num_cached for reply in found[1:])


def test_a_folder_that_is_removed_while_it_serves_ends_no_request(
    nano_hybrid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    histories = [words(seed, 45) for seed in range(4)]
    plain = [ask(nano_hybrid, history) for history in histories]
    ask(nano_hybrid, histories[1], cache_disk=str(tmp_path / "kept"))
    caplog.clear()

    def remove(number: int) -> None:
        if number == 1:
            (tmp_path / "kept").rename(tmp_path / "elsewhere")  # at once, whatever is being written
        if number == 2:
            (tmp_path / "kept").write_text("a file in its place")

    found = chat(nano_hybrid, tmp_path / "kept", histories, remove)
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in plain]
    assert found[1].num_cached == 0
    assert found[-1].stats["num_disk_failed"] + found[-1].stats["num_disk_dropped"] >= 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) <= 1
