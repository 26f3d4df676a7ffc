"""`plait bench`: sides in processes of their own, ratios, checks, JSON, a plot. No time is asserted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import plait.bench.ops.run as bench_ops
from plait.bench import machine
from plait.bench.model.bandwidth import Probe
from plait.bench.model.compare import SOURCE, Cannot, Side, contestant
from plait.bench.model.measure import Measure, MeasureSizes, Prompts, Row, cap_sizes, one, take_turns
from plait.bench.model.report import model_report
from plait.bench.model.run import agreement, name_apart, shortest_agreement
from plait.bench.ops.roofline import REALISTIC, work_of
from plait.cli.bench import find_changes, parse_options
from plait.config import EngineConfig
from plait.errors import ConfigError, EngineError
from plait.ops.registry import REGISTRY

Run = Callable[..., Any]
SMALL = (
    *("--cpu", "--threads", "1", "--repeats", "1", "--tokens", "2", "--contexts", "4,8"),
    *("--lengths", "16", "--prompts", "4", "--batches", "1,3", "--check-tokens", "4"),
)
FAKE = '''
"""An engine that counts."""
class Side:
    def __init__(self, model, threads, max_model_len, max_num_seqs, options):
        if model.endswith(".bad"):
            raise NotImplementedError("it reads no .bad files")
        print("noise on stdout")
        self.facts = {"engine": "counter", "version": "1", "threads": threads}
    def greedy(self, prompts, tokens):
        return [[ids[-1]] * tokens for ids in prompts]
    def prefill(self, ids, level):
        return 0.5
    def decode(self, ids, tokens, level):
        if len(ids) > 500:
            raise ValueError("too\\nlong")
        return tokens / 10
    def batch(self, prompts, tokens, level):
        if level == "llm":
            raise NotImplementedError("one at a time")
        n = len(prompts) * tokens
        return {"seconds": 2.0, "tokens": n, "decode_seconds": 1.0, "decode_tokens": n}
    def die(self):
        import os
        os._exit(7)
    def close(self):
        pass
'''


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "counting_side.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(None, 50)


def loaded(fake: Path, name: str = "fake") -> Side:
    side = Side(name, fake)
    side.load(model="m", threads=2, max_model_len=64, max_num_seqs=2, options={})
    return side


def test_a_side_answers_whatever_it_prints(fake: Path) -> None:
    with Side("fake", fake) as side:
        facts = side.load(model="m", threads=2, max_model_len=64, max_num_seqs=2, options={})
        assert (facts["engine"], facts["threads"]) == ("counter", 2)
        assert facts["startup_s"] >= 0
        assert side.greedy([[1, 2], [3]], 2) == [[2, 2], [3, 3]]
        assert side.ask("memory")["peak_mib"] > 0


def test_what_a_side_cannot_do_is_reported_by_name(fake: Path) -> None:
    with Side("fake", fake) as side, pytest.raises(Cannot, match=r"fake: it reads no \.bad files"):
        side.load(model="x.bad", threads=1, max_model_len=8, max_num_seqs=1, options={})


def test_a_side_that_fails_or_dies_is_a_typed_error(fake: Path) -> None:
    with loaded(fake) as side:
        with pytest.raises(EngineError, match="fake: ValueError during 'decode': too long"):
            side.ask("decode", ids=[1] * 501, tokens=1, level="llm")
        with pytest.raises(EngineError, match="ended with code 7 during 'die'"):
            side.ask("die")


def test_an_interpreter_that_cannot_run_is_a_typed_error(fake: Path) -> None:
    with pytest.raises(EngineError, match="cannot be run"):
        Side("fake", fake, python="/nowhere/python")


def test_sides_take_turns_and_what_one_cannot_do_is_recorded(fake: Path, prompts: Prompts) -> None:
    probe = Probe(1, 1)
    with loaded(fake, "a") as a, loaded(fake, "b") as b:
        row = take_turns(Measure("decode", "runner", 20, 8), [a, b], prompts, 2, probe)
        whole = take_turns(Measure("requests", "llm", 4, 8, 8), [a, b], prompts, 2)
    probe.close()
    assert row.values == {"a": [10.0, 10.0], "b": [10.0, 10.0]}
    assert len(row.probe_gb_s) == 2
    assert min(row.probe_gb_s) > 0
    assert whole.cannot == {"a": "one at a time", "b": "one at a time"}


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        (Measure("decode", "llm", 20, 8), 10.0),
        (Measure("prefill", "runner", 20), 40.0),
        (Measure("ttft", "llm", 20), 500.0),
        (Measure("batch", "runner", 4, 8, 5), 32.0),
        (Measure("requests", "runner", 4, 8, 5), 16.0),
    ],
)
def test_seconds_become_the_unit_of_a_measure(
    fake: Path, prompts: Prompts, measure: Measure, value: float
) -> None:
    with loaded(fake) as side:
        assert one(measure, side, prompts, 0) == pytest.approx(value)


def test_a_ratio_above_one_means_that_ours_is_better() -> None:
    rate = Row(Measure("decode", "runner", 1, 1), {"plait": [10, 30, 20], "x": [10, 10, 10]})
    assert rate.ratio("plait", "x") == 2
    assert rate.ratio("plait", "nobody") is None
    time = Row(Measure("ttft", "llm", 1), {"plait": [10, 10, 5], "x": [10, 30, 10]})
    assert time.ratio("plait", "x") == 2
    assert (rate.best("plait"), time.best("plait")) == (30, 5)


def test_the_share_of_the_roof_is_of_the_bandwidth_measured_with_it() -> None:
    row = Row(Measure("decode", "runner", 1, 1), {"plait": [100.0], "x": [50.0]}, probe_gb_s=[20.0, 20.0])
    plain = row.plain("plait", {"plait": 1e8})
    assert plain["sides"]["plait"]["roof_share"] == 0.5
    assert "roof_share" not in plain["sides"]["x"]
    assert plain["ratios"] == {"x": 2.0}


def test_sizes_are_cut_to_the_context_and_tried_once() -> None:
    assert cap_sizes((20, 128, 512, 1000), 100) == [20, 100]
    for max_len in (1, 2, 7, 64, 8192):
        measures = MeasureSizes().measures(max_len)
        assert len(measures) == len(set(measures))
        assert max_len < 4 or all(m.length <= max_len for m in measures if m.kind in ("decode", "batch"))


def test_prompts_have_exactly_their_length_and_differ(prompts: Prompts) -> None:
    assert [len(prompts(n)) for n in (1, 9, 100)] == [1, 9, 100]
    assert prompts(9) == prompts(9)
    assert prompts(9) != prompts(9, 1)
    assert all(0 <= i < 50 for i in prompts(100))


def test_agreement_counts_first_tokens() -> None:
    assert agreement([1, 2, 3], [1, 2, 4]) == 2
    assert agreement([1, 2], [1, 2, 4]) == 2
    assert shortest_agreement([[1, 2], [1, 2]], [[1, 2], [2, 2]]) == 0


def test_options_of_the_other_side_are_read_like_a_command_line() -> None:
    assert parse_options("--ops reference --threads 1") == {"ops": "reference", "threads": 1}
    assert parse_options("--cpu") == {"device": "cpu"}
    assert find_changes({"threads": 2, "ops": EngineConfig().ops}) == {"threads": 2}
    with pytest.raises(ConfigError, match="--nonsense"):
        parse_options("--nonsense 1")


def test_what_to_compare_with_is_found_by_its_form(fake: Path, tmp_path: Path) -> None:
    def find(what: str) -> Any:
        return contestant(what, "m.gguf", {"threads": 2}, parse_options)

    assert find("--ops reference").options == {"threads": 2, "ops": "reference"}
    assert find(str(tmp_path)).model == str(tmp_path)
    peer = find(f"llama.cpp@{sys.executable}=other.gguf")
    assert (peer.name, peer.python, peer.model) == ("llama.cpp", sys.executable, "other.gguf")
    assert not peer.is_plait
    assert find(str(fake)).name == "counting"
    with pytest.raises(ConfigError, match="no interpreter /nowhere"):
        find("openvino@/nowhere")
    with pytest.raises(ConfigError, match="a git revision") as error:
        find("nothing-like-this")
    assert "ctranslate2" in str(error.value)
    if (SOURCE / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", find("HEAD").revision)
    twice = name_apart([find("--cpu"), find("--cpu")])
    assert [who.name for who in twice] == ["--cpu", "--cpu (2)"]


@pytest.mark.slow
def test_a_model_is_compared_with_another_engine_as_json_and_plot(
    plait: Run, nano_hybrid: Path, fake: Path, tmp_path: Path
) -> None:
    page = tmp_path / "bench.html"
    asked = (*SMALL, "--compare", str(fake), "--json", "--plot", str(page))
    result = plait("bench", "model", str(nano_hybrid), *asked)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert set(found["sides"]) == {"plait", "counting"}
    assert found["checks"]["batch_equals_single_for"] >= 4
    assert found["sides"]["plait"]["peak_mib"] >= found["sides"]["plait"]["loaded_mib"] > 0
    ours = found["sides"]["plait"]
    assert ours["startup_image"] == "used", "start-up and memory are those of a second startup"
    assert ours["ops"]["linear"]
    assert 0 < found["model"]["read_per_token"] < found["model"]["nbytes"]  # no embedding, half the experts
    seen = {(row["measure"], row["level"], row["size"]) for row in found["rows"]}
    assert {("decode", "runner", 4), ("decode", "runner", 8), ("batch", "runner", 3)} <= seen
    for row in found["rows"]:
        assert row["sides"]["plait"]["median"] > 0
        assert row["probe_gb_s"] > 0
        assert ("counting" in row["ratios"]) == (row["measure"] != "requests")
    assert found["rows"][0]["sides"]["plait"]["roof_share"] > 0
    said = StringIO()
    model_report(found, Console(file=said, width=200))
    for words in ("decode, context 4", "× counting", "of roof", "checked: ", "counting writes", "start-up s"):
        assert words in said.getvalue()
    html = page.read_text()
    assert "<svg" in html
    assert "counting" in html
    outside = re.sub(r'xmlns="[^"]*"', "", html)
    assert not re.search(r"https?:|<script|<link|@import|url\(", outside)


def test_errors_are_one_line_and_say_what_to_do(plait: Run, nano_hybrid: Path, tmp_path: Path) -> None:
    for asked, code, words in (
        (("model",), 2, "name a model"),
        (("model", str(tmp_path / "nowhere")), 3, "nowhere"),
        (("model", str(nano_hybrid), "--compare", "nothing-like-this"), 2, "a git revision"),
        (("op", "nothing"), 2, "rms_norm"),
    ):
        result = plait("bench", *asked)
        assert result.code in (2, 3) if code == 3 else result.code == code
        assert words in result.err.splitlines()[-1]
        assert "Traceback" not in result.err


def test_ops_are_checked_and_timed(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ops, "IN_MEMORY", 16 << 20)
    result = plait("bench", "op", "rms_norm", "--small", "--threads", "1", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    variants = {row["variant"] for row in found["rows"]}
    assert "reference" in variants
    assert all(row["wrong"] is None for row in found["rows"])
    assert found["roofs"]["gb_s"] > 0


def test_an_op_of_a_plug_in_is_timed(plait: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_ops, "IN_MEMORY", 16 << 20)
    plugin = tmp_path / "triple.py"
    plugin.write_text(
        "from plait.ops.elementwise import elementwise_op\n"
        "@elementwise_op()\ndef triple(x):\n    return 3 * x\n"
    )
    try:
        result = plait("bench", "op", "triple", "--small", "--json", "--plugin", str(plugin))
    finally:
        REGISTRY.pop("triple", None)
    assert result.code == 0, result.err
    assert {row["op"] for row in json.loads(result.out)["rows"]} == {"triple"}


def test_the_work_of_realistic_cases_is_known() -> None:
    from plait.model.mixers.registry import list_mixers

    list_mixers()
    assert set(REALISTIC) <= set(REGISTRY)
    case = {"rows": 2, "n_in": 64, "n_out": 32, "bias": False}
    make = REGISTRY["linear"].make
    assert make is not None
    import torch

    args, _ = make(case, torch.float32, "cpu")
    work = work_of("linear", case, args)
    assert work is not None
    assert work.flops == 2 * 2 * 64 * 32
    assert work.nbytes == 4 * (64 * 32 + 2 * 64 + 2 * 32)
    assert work_of("rms_norm", case, args) is None


def test_the_machine_is_described_and_has_a_name_for_files() -> None:
    described = machine.describe()
    assert described["cores"] >= 1
    assert described["cpu"]
    slug = machine.slug(described)
    assert slug.endswith("-cores")
    assert slug == slug.lower().replace(" ", "-")
