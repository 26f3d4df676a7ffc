"""Engines that are compared with ours: the same ids, the same threads, no memory of earlier requests.

The engines themselves are not installed here: modules of their names say what they were given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.bench.engines.child import descendants, load_side, memory_mib
from plait.bench.model.compare import PEERS, PROGRAMS, SIDES, contestant
from plait.cli.bench import parse_options
from plait.errors import ConfigError

ROOM = {"threads": 2, "max_model_len": 64, "max_num_seqs": 4, "options": {}}
NAMES = sorted(PEERS.keys() - PROGRAMS)  # those in Python


class Given(list[Any]):
    """What a module was called with, in order."""

    def of(self, name: str) -> Any:
        return next(value for key, value in reversed(self) if key == name)


def given_by(name: str, given: Given, value: Any) -> Any:
    """A callable that notes its named arguments, or its only one, and returns `value`."""

    def call(*args: Any, **named: Any) -> Any:
        given.append((name, named or args))
        return value(*args, **named) if callable(value) else value

    return call


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, given: Given, tmp_path: Path) -> Any:
    """A side of vLLM over a module that counts: token t of sequence s comes at (s + t) tenths of a second."""

    def generate(prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        tokens = params.max_tokens
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=tuple(p["prompt_token_ids"][-1:] * tokens))],
                metrics=SimpleNamespace(first_token_ts=s / 10, last_token_ts=(s + tokens - 1) / 10),
            )
            for s, p in enumerate(prompts)
        ]

    core = SimpleNamespace(shutdown=given_by("shutdown", given, None))
    llm = SimpleNamespace(
        generate=given_by("generate", given, generate), llm_engine=SimpleNamespace(engine_core=core)
    )
    fake = SimpleNamespace(
        __version__="1", LLM=given_by("LLM", given, llm), SamplingParams=lambda **k: SimpleNamespace(**k)
    )
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    monkeypatch.setattr(os, "environ", {"LD_PRELOAD": "/x.so"})
    (tmp_path / "config.json").write_text("{}")
    return load_side(str(SIDES / PEERS["vllm"]))(model=str(tmp_path), **ROOM)


def test_vllm_remembers_no_prefix_and_has_our_threads_and_no_network(vllm: Any, given: Given) -> None:
    asked = given.of("LLM")
    assert asked["enable_prefix_caching"] is False
    assert asked["enforce_eager"] is True
    assert (asked["max_model_len"], asked["max_num_seqs"], asked["dtype"]) == (64, 4, "bfloat16")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:2]
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, cores))
    assert (vllm.facts["engine"], vllm.facts["threads"]) == ("vllm", 2)


def test_vllm_gets_ids_and_is_timed_by_its_own_tokens(vllm: Any, given: Given) -> None:
    assert vllm.greedy([[1, 2], [3]], 2) == [[2, 2], [3, 3]]
    assert given.of("generate")
    assert vllm.decode([5, 6], 8, "llm") == pytest.approx(0.8)
    together = vllm.batch([[1], [2], [3]], 8, "llm")
    assert together["decode_seconds"] == pytest.approx(0.7)  # from 0.2, when all have one, to 0.9
    assert (together["tokens"], together["decode_tokens"]) == (24, 21)
    assert 0 <= vllm.prefill([1, 2], "llm") < 1
    vllm.close()
    assert given.of("shutdown") == ()


@pytest.fixture(params=["all tokens so far", "new tokens"])
def sglang(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, given: Given, tmp_path: Path
) -> Any:
    """A side of SGLang over a module that streams token by token, sequences in turns."""

    def generate(input_ids: Any, sampling_params: Any, stream: bool) -> Any:
        assert stream
        for n in range(1, sampling_params["max_new_tokens"] + 1):
            for row, ids in enumerate(input_ids):
                new = ids[-1:] * (n if request.param == "all tokens so far" else 1)
                yield {"index": row, "output_ids": new, "meta_info": {"completion_tokens": n}}

    llm = SimpleNamespace(
        generate=given_by("generate", given, generate), shutdown=given_by("shutdown", given, None)
    )
    fake = SimpleNamespace(__version__="1", Engine=given_by("Engine", given, llm))
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "config.json").write_text("{}")
    return load_side(str(SIDES / PEERS["sglang"]))(model=str(tmp_path), **ROOM)


def test_sglang_remembers_no_prefix_gets_ids_and_is_timed_by_its_stream(sglang: Any, given: Given) -> None:
    asked = given.of("Engine")
    assert asked["disable_radix_cache"] is True
    assert (asked["context_length"], asked["max_running_requests"], asked["dtype"]) == (64, 4, "bfloat16")
    assert asked["max_total_tokens"] == 64 * 4
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    found, before, decoding = sglang.run([[1, 2], [3]], 3)
    assert found == [[2, 2, 2], [3, 3, 3]]
    assert given.of("generate")["sampling_params"]["ignore_eos"] is True
    assert before > 0
    assert decoding > 0
    assert sglang.greedy([[5]], 1) == [[5]]
    sglang.close()
    assert given.of("shutdown") == ()


def test_sglang_names_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="sglang=FOLDER"):
        load_side(str(SIDES / PEERS["sglang"]))(model=str(tmp_path / "a.gguf"), **ROOM)


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch, given: Given) -> Any:
    class Pipeline:
        def __init__(self, model: str, device: str, **named: Any) -> None:
            given.append(("pipeline", named))

        def generate(self, inputs: Any, config: Any) -> Any:
            given.append(("ids", inputs))
            rows = [list(row[-1:]) * config.max_new_tokens for row in inputs]
            first = SimpleNamespace(get_ttft=lambda: SimpleNamespace(mean=0.0))
            return SimpleNamespace(tokens=rows, perf_metrics=first)

    fake = SimpleNamespace(
        __version__="1",
        LLMPipeline=Pipeline,
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        TokenizedInputs=lambda ids, mask: ids,
    )
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array.tolist()))
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    return load_side(str(SIDES / PEERS["openvino"]))(model="m.gguf", **ROOM)


def test_openvino_remembers_no_prefix_and_has_our_threads(openvino: Any, given: Given) -> None:
    asked = given.of("pipeline")
    assert asked["scheduler_config"].enable_prefix_caching is False
    assert asked["scheduler_config"].max_num_batched_tokens > 10**6
    assert asked["INFERENCE_NUM_THREADS"] == 2
    assert openvino.greedy([[1, 2], [3, 4]], 2) == [[2, 2], [4, 4]]
    assert given.of("ids") == [[3, 4]]
    assert openvino.batch([[1], [2]], 3, "llm")["decode_tokens"] == 4


@pytest.fixture
def onnxruntime(monkeypatch: pytest.MonkeyPatch, given: Given, tmp_path: Path) -> Any:
    class Generator:
        def __init__(self, model: Any, params: Any) -> None:
            self.last: list[int] = []

        def append_tokens(self, ids: Any) -> None:
            given.append(("ids", ids))
            self.last = [row[-1] for row in ids] if isinstance(ids[0], list) else [ids[-1]]

        def generate_next_token(self) -> None:
            given.append(("step", None))

        def get_next_tokens(self) -> list[int]:
            return self.last

    params = SimpleNamespace(set_search_options=given_by("search", given, None))

    def model(folder: str) -> Any:
        given.append(("config", json.loads((Path(folder) / "genai_config.json").read_text())))
        assert (Path(folder) / "model.onnx").read_text() == "weights"
        return SimpleNamespace()

    fake = SimpleNamespace(
        __version__="1", Model=model, Generator=Generator, GeneratorParams=lambda model: params
    )
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", fake)
    (tmp_path / "model.onnx").write_text("weights")
    (tmp_path / "genai_config.json").write_text('{"model": {"decoder": {}}}')
    return load_side(str(SIDES / PEERS["onnxruntime-genai"]))(model=str(tmp_path), **ROOM)


def test_onnxruntime_has_our_threads_and_never_ends_early(onnxruntime: Any, given: Given) -> None:
    session = given.of("config")["model"]["decoder"]["session_options"]
    assert session["intra_op_num_threads"] == 2
    assert onnxruntime.greedy([[1, 2]], 3) == [[2, 2, 2]]
    assert given.of("ids") == [1, 2]
    onnxruntime.batch([[1, 2], [3, 4]], 3, "llm")
    asked = given.of("search")
    assert (asked["min_length"], asked["max_length"], asked["batch_size"]) == (5, 5, 2)
    onnxruntime.close()


@pytest.fixture
def ctranslate2(monkeypatch: pytest.MonkeyPatch, given: Given, tmp_path: Path) -> Any:
    def batch(words: list[list[str]], **named: Any) -> list[Any]:
        given.append(("words", words))
        return [SimpleNamespace(sequences_ids=[[7] * named["max_length"]]) for _ in words]

    generator = SimpleNamespace(compute_type="int8", generate_batch=batch, unload_model=lambda: None)
    fake = SimpleNamespace(__version__="1", Generator=given_by("generator", given, generator))
    monkeypatch.setitem(sys.modules, "ctranslate2", fake)
    (tmp_path / "model.bin").write_text("")
    (tmp_path / "vocabulary.json").write_text('["a", "b", "c"]')
    return load_side(str(SIDES / PEERS["ctranslate2"]))(model=str(tmp_path), **ROOM)


def test_ctranslate2_gets_the_same_ids_as_words(ctranslate2: Any, given: Given) -> None:
    assert given.of("generator")["intra_threads"] == 2
    assert ctranslate2.greedy([[2, 0]], 2) == [[7, 7]]
    assert given.of("words") == [["c", "a"]]
    assert ctranslate2.decode([1], 4, "llm") > 0
    assert ctranslate2.batch([[1], [2]], 4, "llm")["decode_tokens"] == 6


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("transformers", "openvino")])
def test_files_of_another_kind_are_refused_with_the_right_one(name: str, tmp_path: Path) -> None:
    side = load_side(str(SIDES / PEERS[name]))
    with pytest.raises(NotImplementedError, match=f"{name}="):
        side(model=str(tmp_path), **ROOM)


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_has_a_side_and_a_name(name: str) -> None:
    found = contestant(f"{name}@{sys.executable}=folder", "m.gguf", {}, parse_options)
    assert found.script.exists()
    assert (found.name, found.model, found.is_plait) == (name, "folder", False)
    with pytest.raises(ConfigError, match="no interpreter"):
        contestant(f"{name}@/nowhere/python", "m.gguf", {}, parse_options)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells it")
def test_memory_of_processes_that_an_engine_starts_counts() -> None:
    alone = memory_mib("VmHWM")
    with subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * (100 << 20); print('here', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.pid in descendants(os.getpid())
        assert memory_mib("VmHWM") > alone + 90
        process.communicate(b"\n")
    assert process.pid not in descendants(os.getpid())


def test_load_side_takes_the_one_class_that_is_named_side(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Helper: ...\nclass OtherSide: ...\n")
    (tmp_path / "plain.py").write_text("class Side: ...\n")
    (tmp_path / "two.py").write_text("class OneSide: ...\nclass OtherSide: ...\n")
    assert load_side(str(tmp_path / "one.py")).__name__ == "OtherSide"
    assert load_side(str(tmp_path / "plain.py")).__name__ == "Side"
    with pytest.raises(ImportError, match="one class with a name like LlamaCppSide was expected, found 2"):
        load_side(str(tmp_path / "two.py"))
