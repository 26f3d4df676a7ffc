"""`plait serve` with two models and one that cannot be loaded: loading, crashes and unloading, for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import InternalServerError, NotFoundError, OpenAI

from tests.e2e.conftest import NANO_HYBRID, Server, serve
from tests.patience import until

WEIGHTS = NANO_HYBRID / "model.safetensors"


def damage(folder: Path) -> Path:
    """A model with weights that end in the middle."""
    folder.mkdir()
    for file in NANO_HYBRID.iterdir():
        text = file.read_bytes()
        (folder / file.name).write_bytes(text[:100_000] if file == WEIGHTS else text)
    return folder


def stage(server: Server, name: str) -> str:
    found: str = server.get(f"/v1/models/{name}")["status"]["value"]
    return found


def engines(server: Server) -> set[int]:
    """The processes of engines: they have the numbers of a shared status block among their arguments."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = {int(pid) for file in children for pid in file.read_text().split()}
    return {pid for pid in pids if b"plait.worker.child" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@contextmanager
def serving(*models: str) -> Iterator[tuple[Server, OpenAI]]:
    """A server of these models, and options, with a client of it."""
    first, *rest = models
    options = [word for one in rest for word in (("--model", one) if "=" in one else (one,))]
    with serve(first, *options) as server:
        url = server.url + "/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield server, client


def complete(client: OpenAI, model: str) -> str:
    return (
        client.completions.create(model=model, prompt="And it came", max_tokens=12, temperature=0)
        .choices[0]
        .text
    )


def test_two_models_answer_and_one_that_fails_harms_neither(tmp_path: Path) -> None:
    bad = damage(tmp_path / "bad")
    names = (f"first={NANO_HYBRID}", f"second,gpt-4={NANO_HYBRID}", f"bad={bad}")
    with serving(*names) as (server, client):
        assert [model.id for model in client.models.list()] == ["first", "second", "bad"]
        assert (stage(server, "first"), stage(server, "second")) == ("loaded", "unloaded")
        text = complete(client, "first")
        assert complete(client, "gpt-4") == text
        with pytest.raises(InternalServerError, match=r"'bad' cannot be loaded: model.safetensors"):
            complete(client, "bad")
        with pytest.raises(NotFoundError, match="'first', 'second', 'bad'"):
            complete(client, "third")
        assert stage(server, "bad") == "failed"
        assert complete(client, "first") == complete(client, "second") == text


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_an_idle_one_ends() -> None:
    names = [f"{name}={NANO_HYBRID}" for name in ("first", "second", "third")]
    with serving(*names, "--keep-alive", "6s", "--max-loaded-models", "2") as (server, client):
        first = engines(server)
        text = complete(client, "second")
        (second,) = engines(server) - first
        os.kill(second, signal.SIGKILL)
        assert complete(client, "first") == text
        assert complete(client, "second") == text
        assert first < engines(server)
        assert second not in engines(server)
        assert complete(client, "third") == text  # the one that was used longest ago makes place
        assert stage(server, "first") == "unloaded"
        until(lambda: not engines(server))
        assert {stage(server, name) for name in ("first", "second", "third")} == {"unloaded"}
        assert complete(client, "first") == text


@pytest.mark.slow
def test_a_first_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    names = (f"bad={damage(tmp_path / 'bad')}", f"first={NANO_HYBRID}")
    with pytest.raises(AssertionError, match="the server ended"), serving(*names):
        pytest.fail("it is served")
