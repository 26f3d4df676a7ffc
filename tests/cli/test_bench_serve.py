"""`plait bench serve` as a command: what it takes, what it says, what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.bench.serve.run import ServeJob, Started
from plait.cli.bench_serve import _job, serve
from tests.server.conftest import serving
from tests.server.fake import fake_front

Run = Callable[..., Any]
LOAD = ("--num-prompts", "4", "--input-len", "8-16", "--output-len", "5")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(fake_front()) as client:
        yield client.base_url


def job(*words: str) -> ServeJob:
    given = serve.make_context("serve", list(words)).params
    return _job(given)


def test_the_result_is_one_json_object_in_vllms_words(plait: Run, url: str) -> None:
    done = plait("bench", "serve", "--base-url", url, *LOAD, "--json", "--detailed", "--goodput", "ttft:1e6")
    assert done.code == 0, done.err
    (side,) = json.loads(done.out)["sides"]
    assert (side["completed"], side["failed"], side["total_output_tokens"]) == (4, 0, 20)
    assert side["request_goodput"] == side["request_throughput"]
    kinds = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    assert {f"{kind}_{name}_ms" for kind in kinds for name in ("ttft", "tpot", "itl", "e2el")} <= set(side)
    assert side["output_lens"] == [5] * 4


def test_options_without_effect_are_refused(plait: Run, url: str) -> None:
    for given, text in (
        (("--cpu",), "--cpu has no effect: --base-url names a server that runs"),
        (("--threads", "2"), "--threads has no effect: --base-url names a server that runs"),
        (("--burstiness", "2"), "--burstiness has no effect: without --request-rate"),
        (("--prefix-groups", "2"), "--prefix-groups has no effect: no text is shared"),
    ):
        done = plait("bench", "serve", "--base-url", url, *LOAD, *given)
        assert done.code == 2
        assert text in done.err


def test_the_table_compares_servers_and_a_page_draws_them(plait: Run, url: str, tmp_path: Path) -> None:
    page = tmp_path / "load.html"
    given = ("--base-url", url, "--base-url", url, *LOAD, "--endpoint", "completions", "--plot", str(page))
    done = plait("bench", "serve", *given)
    assert done.code == 0, done.err
    for word in ("completed", "time to the first token, p99", "tok/s", "(2)", "seed 0", "client:"):
        assert word in done.out
    drawn = page.read_text()
    assert drawn.startswith("<!doctype html>")
    assert drawn.count("<svg") >= 4
    assert "http-equiv" not in drawn


def test_errors_are_reported_with_an_example(plait: Run, url: str, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "BOOM"}]}')
    done = plait(
        "bench", "serve", "--base-url", url, "--num-prompts", "4", "--dataset", str(chats), "--warm-up", "0"
    )
    assert done.code == 0, done.err
    assert "4 × in stream: " in done.out
    assert "the engine failed here" in done.out


def test_a_picture_is_drawn_where_matplotlib_is(
    plait: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "load.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = plait("bench", "serve", "--base-url", url, *LOAD, "--plot", str(picture))
    assert done.code == 2
    assert "a PNG needs matplotlib" in done.err
    drawn = SimpleNamespace(Figure=FakeFigure)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", drawn)
    assert plait("bench", "serve", "--base-url", url, *LOAD, "--plot", str(picture)).code == 0
    assert "time to the first token" in picture.read_text()


class FakeFigure:
    """As much of matplotlib's as is used: it writes down what was drawn."""

    def __init__(self, **size: Any) -> None:
        self.said: list[str] = []

    def subplots(self, rows: int, squeeze: bool) -> Any:
        import numpy as np

        return np.array([[self] for _ in range(rows)], dtype=object)

    def savefig(self, path: Path, dpi: int) -> None:
        path.write_text("\n".join(self.said))

    def barh(self, places: list[float], values: list[float], height: float, **style: Any) -> None:
        assert len(places) == len(values)

    def set_yticks(self, places: list[float], names: list[str]) -> None:
        assert len(places) == len(names)

    def set_title(self, text: str, **style: Any) -> None:
        self.said.append(text)

    def invert_yaxis(self) -> None:
        return

    def legend(self, **style: Any) -> None:
        return


def test_what_is_given_becomes_the_load() -> None:
    found = job(
        *("--base-url", "http://a:1/v1/", "--request-rate", "4", "--burst", "2", "--concurrency", "8"),
        *(
            "--input-len",
            "sharegpt",
            "--output-len",
            "9",
            "--prefix-share",
            "0.5",
            "--turns",
            "3",
            "--seed",
            "5",
        ),
        *(
            "--cancel-rate",
            "0.25",
            "--goodput",
            "ttft:5 tpot:6",
            "--extra-body",
            '{"top_k": 3}',
            "--api-key",
            "k",
        ),
        *("--endpoint", "completions", "--stop-at-eos", "--duration-s", "7", "--api-key", "k"),
    )
    (side,) = found.sides
    assert not isinstance(side, Started)
    assert (side.name, side.base_url, side.api_key, side.chat) == ("a:1", "http://a:1/v1/", "k", False)
    assert (side.ignore_eos, side.extra, side.headers) == (False, {"top_k": 3}, {"Authorization": "Bearer k"})
    arrivals, load = found.arrivals, found.workload
    assert (arrivals.rate, arrivals.burst, arrivals.concurrency) == (4.0, 2, 8)
    assert (arrivals.num_prompts, arrivals.duration_s) == (None, 7.0)
    assert (str(load.input_len), str(load.output_len), load.turns, load.seed) == ("sharegpt", "9", 3, 5)
    assert (load.prefix_share, load.cancel_rate, found.limits) == (0.5, 0.25, {"ttft": 5.0, "tpot": 6.0})


def test_a_model_is_served_with_the_engines_options_and_compared_with_others() -> None:
    words = ("m.gguf", "--cpu", "--max-num-seqs", "4", "--compare", "--threads 1", "--compare", "--threads 1")
    first, *others = job(*words).sides
    assert first == Started("plait", "m.gguf", ["--device", "cpu", "--max-num-seqs", "4"])
    assert [other.name for other in others] == ["--threads 1", "--threads 1 (2)"]
    assert isinstance(others[0], Started)
    assert others[0].options == ["--device", "cpu", "--max-num-seqs", "4", "--threads", "1"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name either a MODEL to serve, or servers"),
        (("m", "--base-url", "http://x"), "name either a MODEL to serve, or servers"),
        (("--base-url", "http://x", "--compare", "--threads 1"), "give another --base-url"),
        (("--base-url", "http://x", "--extra-body", "{"), "--extra-body: it is not JSON"),
        (("--base-url", "http://x", "--extra-body", "[]"), "it must be a JSON object"),
        (("--base-url", "http://x", "--input-len", "many"), "'many' is not a length"),
        (("--base-url", "http://x", "--goodput", "soon"), "--goodput 'soon'"),
        (("--base-url", "http://x", "--request-rate", "0"), "rate: 0.0 is not more than 0"),
        (("--base-url", "http://x", "--duration-s", "5"), "without a rate or a concurrency"),
        (("--base-url", "http://127.0.0.1:1"), "is it the address of an OpenAI server"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_runs(plait: Run, words: tuple[str, ...], why: str) -> None:
    done = plait("bench", "serve", *words)
    assert done.code == 2
    assert why in done.err
