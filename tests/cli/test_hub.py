"""`plait pull`, `list` and `rm`, against a small hub of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.cli.hub import ago
from tests.checkpoint.hub.fake_hub import FakeHub, Repo, running
from tests.checkpoint.hub.test_client import SMALL, aim, tensors
from tests.checkpoint.readers.damage import write_plain

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with running() as made:
        yield made


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    server.repos = {"org/m": Repo(), "org/q": Repo()}
    server.repos["org/m"].commit({**SMALL, "model.safetensors": tensors(3000), "README.md": b"no"})
    server.repos["org/q"].commit({"q-Q4_0.gguf": b"GGUF4", "q-Q8_0.gguf": b"GGUF8"})
    server.broken, server.drops = None, 0
    server.forget()
    aim(server.url, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return server


def test_a_model_is_pulled_listed_and_removed(plait: Run, hub: FakeHub, tmp_path: Path) -> None:
    assert "plait pull org/name" in plait("list").out
    pulled = plait("pull", "org/m")
    assert pulled.code == 0, pulled.err
    assert pulled.out.startswith("org/m at ")
    assert "fetched 3.0 KiB" in pulled.out
    assert pulled.err == ""  # no progress bars in a pipe
    assert "everything was there" in plait("pull", "org/m").out
    assert plait("pull", "org/q:Q8_0").code == 0

    shown = plait("list").out
    assert "org/m  " in shown
    assert "gguf Q8_0" in shown
    assert "just now" in shown
    (m, q) = json.loads(plait("list", "--json").out)
    assert (m["name"], m["kind"], m["refs"]) == ("org/m", "safetensors", ["main"])
    assert (q["quantizations"], q["files"]) == (["Q8_0"], {"q-Q8_0.gguf": 5})
    assert m["nbytes"] == sum(m["files"].values())

    refused = plait("rm", "org/m")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "stdin is no terminal to ask on: pass --yes" in refused.err
    removed = plait("rm", "org/m", "--yes")
    assert (removed.code, removed.out.startswith("removed org/m: ")) == (0, True)
    assert [found["name"] for found in json.loads(plait("list", "--json").out)] == ["org/q"]


def test_a_dry_run_fetches_nothing(plait: Run, hub: FakeHub) -> None:
    shown = plait("pull", "org/m", "--dry-run")
    assert "model.safetensors" in shown.out
    assert "README.md" not in shown.out
    assert hub.fetched() == []
    facts = json.loads(plait("pull", "org/m", "--dry-run", "--json").out)
    assert facts["files"]["model.safetensors"] == {"nbytes": len(tensors(3000)), "there": False}


def test_offline_says_whether_it_is_here(plait: Run, hub: FakeHub) -> None:
    missing = plait("pull", "org/m", "--offline")
    assert missing.code == 3
    assert "with --offline the Hub is not queried" in missing.err
    plait("pull", "org/m")
    hub.forget()
    assert "org/m is on this disk" in plait("pull", "org/m", "--offline").out
    assert hub.asked == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("pull", "org/q"), 2, "name one, like org/q:Q4_0"),
        (("pull", "org/nothing"), 3, "no such repository"),
        (("pull", "org/m", "--revision", "v9"), 3, "no branch, tag or commit 'v9'"),
        (("pull", "not a name"), 2, "is not a name on the Hub"),
        (("rm", "org/nothing", "--yes"), 3, "is not on this disk"),
        (("rm", "../elsewhere", "--yes"), 2, "is not a name on the Hub"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(
    arguments: tuple[str, ...], code: int, message: str, plait: Run, hub: FakeHub
) -> None:
    result = plait(*arguments)
    assert (result.code, result.err.count("\n")) == (code, 1), result.err
    assert message in result.err


def test_every_command_takes_a_name_of_the_hub(plait: Run, hub: FakeHub, tmp_path: Path) -> None:
    """The same model by its name as by its folder; afterwards also without a network."""
    folder = write_plain(tmp_path / "tiny")
    hub.repos["org/tiny"] = Repo()
    hub.repos["org/tiny"].commit({p.name: p.read_bytes() for p in folder.iterdir()})
    by_path = json.loads(plait("info", str(folder), "--json").out)
    for more in ((), ("--offline",)):
        result = plait("info", "org/tiny", "--json", *more)
        assert result.code == 0, result.err
        facts = json.loads(result.out)
        assert facts["spec"] == by_path["spec"]
        assert facts["tokenizer"] == by_path["tokenizer"]
        hub.broken = 500
    refused = plait("info", "org/other", "--offline")
    assert (refused.code, refused.err.count("\n")) == (3, 1)


def test_ages_are_in_words() -> None:
    assert [ago(n) for n in (5, 90, 7200, 86_400 * 400)] == [
        *("just now", "1 minute ago", "2 hours ago", "1 year ago")
    ]
