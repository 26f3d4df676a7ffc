"""Startups from an image of models that draft with their own head: the text of plain runs, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.config import EngineConfig
from plait.loading.image import start, write
from plait.loading.image.start import find_image, load_image, start_image
from plait.request import SamplingParams
from plait.runner.host.block_passes import HostBlockPasses, RecordedPasses
from plait.runner.host.mtp import MtpDrafter
from plait.runner.host.mtp_passes import HostPasses
from plait.schedule.plan import Chunk, SamplingRow, StepPlan
from tests.families.mtp_oracle import LAYOUTS, MtpOracle
from tests.runner.recordings import loaded

SIZES = {
    "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "threads": 2, "device": "cpu"
}  # fmt: skip
MTP = {"speculate": "mtp", "num_draft_tokens": 3}
SCRIPT = """
import json, sys
from plait import LLM, SamplingParams

model, options = sys.argv[1], json.loads(sys.argv[2])
prompts = ["And it came to pass", "In the beginning " * 9, "the"]
settings = [
    dict(temperature=0.0), dict(temperature=0.9, seed=5, top_p=0.9, top_k=40, min_p=0.01),
    dict(temperature=0.8, seed=2, n=2), dict(temperature=0.0, presence_penalty=0.3, stop=["e"]),
    dict(temperature=0.7, seed=3, structured_outputs={"regex": "[a-z]{3,40}( [a-z]{1,9}){4,}"}),
]
with LLM(model, **options) as llm:
    found, engine = [], llm.front.loop.engine

    if engine.speculation is not None:  # whether drafts pay, and turns do, is not left to measured times
        governor = engine.speculation.governor
        governor.choose = lambda count: 2 if count == 1 else 1  # for more there are too few slots
        governor.is_measuring = lambda count: False
        engine.scheduler.costs.step_s = lambda num_tokens: 1e-4

    def reply(given, max_tokens=80, **one):
        outs = llm.generate(given, SamplingParams(max_tokens=max_tokens, **one))
        found.append([list(choice.token_ids) for out in outs for choice in out.outputs])

    for one in settings:
        reply(prompts, **one)  # side by side
        reply(prompts[:1], **one)  # alone: several turns are one call
    reply([*prompts, "David"], 180, temperature=0.6, seed=9, ignore_eos=True)
    again = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0))
    found.append([list(out.outputs[0].token_ids) for out in again])
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    facts = {
        "torch": [name for name in ("torch", "numba") if name in sys.modules or f"/{name}/" in mapped],
        "cached": max(out.num_cached_tokens for out in again),
        "preempted": engine.scheduler.num_preemptions,
        "kind": llm.step_kind,
    }
    if engine.speculation is not None:
        facts["right"] = engine.speculation.num_accepted
        facts["turns"] = sorted({is_drawn for _, is_drawn in engine.runner.replay.turns._turns})
    out = llm.generate(prompts[0], SamplingParams(max_tokens=30, temperature=0.0, prompt_logprobs=1))[0]
    found.append(list(out.outputs[0].token_ids))
    assert not engine.audit()
print(json.dumps([found, facts]))
"""


def run(model: Path, cache: Path, **options: Any) -> tuple[list[Any], dict[str, Any], str]:
    """(replies, facts about the process, what it logged)."""
    given = json.dumps({**SIZES, "cache_dir": str(cache), **options})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), given], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, facts = json.loads(done.stdout.splitlines()[-1])
    return found, facts, done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, kernel_folder: Path) -> Path:
    made = tmp_path_factory.mktemp("image") / "cache"
    made.mkdir()
    (made / "kernels").symlink_to(kernel_folder)
    return made


@pytest.fixture(scope="module")
def first(nano_hybrid: Path, cache: Path) -> list[Any]:
    """The replies of the run that keeps the image."""
    found, facts, _ = run(nano_hybrid, cache, **MTP)
    assert facts["torch"] == ["torch", "numba"]
    assert len(list((cache / "images").iterdir())) == 1
    assert len(list((cache / "packed").iterdir())) == 2, "of the model, and of its head"
    return found


@pytest.mark.sampled(2, across="heavy")
def test_text_is_that_of_runs_without_an_image_and_without_drafts(
    first: list[Any], nano_hybrid: Path, cache: Path
) -> None:
    found, facts, errors = run(nano_hybrid, cache, **MTP)
    assert facts["torch"] == []
    assert "from the startup image" in facts["kind"]
    assert "Traceback" not in errors
    assert facts["right"] > 0
    assert facts["turns"] == [False, True], "greedy ones and drawn ones"
    assert facts["cached"] > 0
    plain, without, _ = run(nano_hybrid, cache, startup_image="off")
    assert "right" not in without
    assert found == first == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"memory_limit": 3_080_000}, {"prefix_cache": False}, {"memory_limit": 3_080_000, "swap_memory": 0}],
    ids=str,
)
def test_so_it_is_with_other_sizes_of_memory(
    options: dict[str, Any], first: list[Any], nano_hybrid: Path, cache: Path
) -> None:
    """These options are not in an image. Little memory: sequences are preempted, some have no drafts."""
    found, facts, _ = run(nano_hybrid, cache, **MTP, **options)
    assert facts["torch"] == []
    assert (facts["preempted"] > 0) is ("memory_limit" in options)
    assert found == first


def drafts(passes: HostPasses, drafter: MtpDrafter, **params: Any) -> list[Any]:
    """Of passes over the same rows in places 0 and 1: a decode, and a chunk of a prompt."""
    numbers, size = np.random.default_rng(1), passes.before.shape[1]
    rows = [numbers.standard_normal((count, size)).astype(np.float32) for count in (1, 5)]
    tables = [drafter.memory.tables(n, 0, 24) for n in range(2)]
    chunks = [Chunk(n, 0, tuple(range(7, 7 + len(row))), tables[n], 0, 1) for n, row in enumerate(rows)]
    sampling = [SamplingRow(SamplingParams(**params), 1, 1, position, 3) for position in (2, 6)]
    return passes.run(StepPlan(1, tuple(chunks)), rows, sampling, 3)


def compare_heads(first: MtpDrafter, second: object) -> None:
    """The same drafts, logits and state, from memory that holds the same."""
    assert isinstance(second, MtpDrafter)
    heads = [(drafter.passes, drafter) for drafter in (first, second)]
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}):
        found = []
        for passes, drafter in heads:
            assert isinstance(passes, RecordedPasses)
            last = passes.blocks if isinstance(passes, HostBlockPasses) else passes.program
            for array in passes.store.arrays.values():
                array[:] = 0
            made = drafts(passes, drafter, **params)
            state = {name: array.tobytes() for name, array in passes.store.arrays.items()}
            found.append((made, state, last.results.logits[:2].tobytes()))
        assert found[0] == found[1]


QUICK = {"deepseek_v3", "mimo_v2_flash"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_head_from_an_image_has_the_bits_of_the_head_that_was_kept(
    name: str, tmp_path: Path, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    oracle, folder = MtpOracle(name, tmp_path / "oracle"), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(oracle.config))
    save_file({n: t.contiguous() for n, t in oracle.tensors.items()}, folder / "model.safetensors")
    (tmp_path / "kernels").symlink_to(kernel_folder)
    options = {"cache_dir": str(tmp_path), "max_model_len": 48, "max_num_seqs": 3, "threads": 2}
    options |= {"max_num_batched_tokens": 24, "device": "cpu", **MTP}
    with loaded(folder, **options) as model:
        drafter = model.drafter
        assert drafter is not None
        assert "written to" in write.keep_image(model, 1 << 40)
        made = start_image(str(folder), EngineConfig(**options))
        assert made is not None
        assert made.engine.speculation is not None
        try:
            compare_heads(drafter, made.engine.speculation.proposer)
        finally:
            made.close()


@pytest.mark.sampled(2, across="heavy")
def test_places_of_drafts_are_as_many_as_memory_has_and_passes_have_rows(
    first: list[Any], nano_hybrid: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for limit, places in ((1 << 30, 4), (3 << 20, 2)):
        config = EngineConfig(**SIZES, **MTP, cache_dir=str(cache), memory_limit=limit)
        made = start_image(str(nano_hybrid), config)
        assert made is not None
        assert made.engine.speculation is not None
        drafter = made.engine.speculation.proposer
        made.close()
        assert isinstance(drafter, MtpDrafter)
        assert drafter.memory.num_places == places
    assert "drafts of 2 sequences at a time fit into 768 KiB, not of 4" in caplog.text


def test_fewer_places_than_memory_has_are_reported(
    first: list[Any], nano_hybrid: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """An image that a run with less memory kept has rows for as many drafts as that run had."""
    config = EngineConfig(**SIZES, **MTP, cache_dir=str(cache), memory_limit=1 << 30)
    plan = start.plan_head_places
    monkeypatch.setattr(start, "plan_head_places", lambda *given, **more: plan(*given, **more | {"most": 2}))
    made = start_image(str(nano_hybrid), config)
    assert made is not None
    made.close()
    assert "drafts of 2 sequences at a time: the startup image is of a run with less memory" in caplog.text


def test_head_of_which_the_packed_weights_are_gone_is_refused_with_one_line(
    first: list[Any], nano_hybrid: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smallest = min((cache / "packed").iterdir(), key=lambda path: path.stat().st_size)
    away = Path(shutil.move(smallest, tmp_path / "away"))
    try:
        assert load_image(str(nano_hybrid), EngineConfig(**SIZES, **MTP, cache_dir=str(cache))) is None
    finally:
        shutil.move(away, smallest)
    (line,) = caplog.messages
    assert "the startup image is not used" in line
    assert "cannot be opened" in line


def test_another_number_of_draft_tokens_has_another_image(
    first: list[Any], nano_hybrid: Path, cache: Path
) -> None:
    for other in ({}, {"speculate": "ngram"}, {**MTP, "num_draft_tokens": 2}):
        assert find_image(str(nano_hybrid), EngineConfig(**SIZES, cache_dir=str(cache), **other)) is None


def test_without_an_image_of_the_model_no_other_file_is_looked_at(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "another-0123456789abcdef.image").touch()
    monkeypatch.setattr(start, "key_of", lambda *_: pytest.fail("a draft model's files are looked up"))
    config = EngineConfig(**SIZES, cache_dir=str(tmp_path), speculate=str(nano_hybrid))
    assert find_image(str(nano_hybrid), config) is None
