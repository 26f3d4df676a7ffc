"""DiffusionGemma: what a whole engine writes is what the published loop writes, with the same noise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from plait.errors import InvalidField, UnsupportedModel
from plait.llm.llm import LLM
from plait.request import SamplingParams
from plait.spec.canvas import NoisyCanvasSpec
from plait.spec.values import decode_spec_value, encode_spec_value
from tests.families import noisy_canvases
from tests.families.noisy_canvases import Oracle
from tests.families.parity import resolved
from tests.loading.adapters.made import linear_modules, write_merged, write_peft

PROMPTS = [[3, 4, 5], [*range(2, 40)], [7] * 16, [*range(50, 71)]]
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=128, startup_image="off", packed_cache="off"
)
ENTROPY_40 = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 40.0}
FEW_BYTES = 498_688


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("diffusion_gemma")
    noisy_canvases.write(found)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, max_num_seqs=4) as loaded:
        yield loaded


def likeliest(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 21, "seed": 11, **more})


def test_texts_are_those_of_the_published_loop(folder: Path, model: LLM) -> None:
    wanted = [Oracle(folder).write(prompt, 21, 11) for prompt in PROMPTS]
    found = model.generate(PROMPTS, likeliest())
    assert [list(one.outputs[0].token_ids) for one in found] == [tokens for tokens, _ in wanted]
    assert [one.outputs[0].trace.num_steps for one in found] == [count for _, count in wanted]


@pytest.mark.parametrize(
    ("strength", "schedule"),
    [
        (0.15, {"max_denoising_steps": 3}),  # of which last bits do not grow so far
        (0.0, {"sampler_config": ENTROPY_40, "confidence_threshold": 5.0, "max_denoising_steps": 40}),
        (0.0, {"sampler_config": ENTROPY_40, "confidence_threshold": 5.0, "stability_threshold": 0}),
    ],
    ids=["what a pass hears", "a canvas that is stable", "a canvas that is sure"],
)
def test_schedules_are_the_checkpoints_own(
    strength: float, schedule: Mapping[str, object], tmp_path: Path
) -> None:
    noisy_canvases.write(tmp_path, strength=strength, **schedule)
    wanted = [Oracle(tmp_path).write(prompt, 16, 11) for prompt in PROMPTS[2:]]
    with LLM(str(tmp_path), **OPTIONS, max_num_seqs=3) as loaded:
        found = loaded.generate(PROMPTS[2:], likeliest(max_tokens=16))
    assert [list(one.outputs[0].token_ids) for one in found] == [tokens for tokens, _ in wanted]
    passes = [count for _, count in wanted]
    assert [one.outputs[0].trace.num_steps for one in found] == passes
    most = 2 * int(schedule.get("max_denoising_steps", 6))  # type: ignore[call-overload]
    assert (min(passes) < most) == (strength < 0.1), "a canvas ends early where that is the point"


def test_texts_do_not_depend_on_steps(folder: Path, model: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=21, presence_penalty=0.5, n=2, top_p=0.9)
    wanted = [[tuple(one.token_ids) for one in found.outputs] for found in model.generate(PROMPTS, drawn)]
    assert len({ids for both in wanted for ids in both}) == 2 * len(PROMPTS)
    with LLM(str(folder), **OPTIONS, max_num_seqs=1, max_num_batched_tokens=16, block_size=16) as other:
        assert [found_in(other, [p], drawn)[0] for p in PROMPTS] == wanted
    again = model.generate([PROMPTS[1]], drawn)
    assert again[0].num_cached_tokens == 32, "prompts are cached by whole blocks"
    assert [tuple(one.token_ids) for one in again[0].outputs] == wanted[1]
    with LLM(str(folder), **OPTIONS, max_num_seqs=4, memory_limit=FEW_BYTES) as narrow:
        found = narrow.generate(PROMPTS, drawn)
        assert [[tuple(one.token_ids) for one in each.outputs] for each in found] == wanted
        assert any(one.trace.num_preemptions for each in found for one in each.outputs)


def found_in(model: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return [[tuple(one.token_ids) for one in found.outputs] for found in model.generate(prompts, params)]


def test_a_reply_ends_with_its_stop_token_and_never_before_min_tokens(model: LLM) -> None:
    whole = model.generate(PROMPTS[:1], likeliest(logprobs=1))[0].outputs[0]
    stop = whole.token_ids[5]
    first = whole.token_ids.index(stop)
    found = model.generate(PROMPTS[:1], likeliest(stop_token_ids=[stop]))[0].outputs[0]
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:first], "stop")
    later = model.generate(PROMPTS[:1], likeliest(stop_token_ids=[stop], min_tokens=7))[0].outputs[0]
    assert stop not in later.token_ids[:7]
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids)
    assert all(token in place for token, place in zip(whole.token_ids, whole.logprobs, strict=True))


def test_the_last_canvas_ends_with_the_longest_sequence(model: LLM) -> None:
    found = model.generate([[*range(2, 93)] + [7] * 30], likeliest(max_tokens=7))[0].outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (7, "length")


def test_a_command_writes_the_same_each_time(folder: Path, kernel_folder: Path, tmp_path: Path) -> None:
    """No startup image is kept: one would compute places as if they were known tokens."""
    (tmp_path / "kernels").symlink_to(kernel_folder)
    wanted = Oracle(folder).write(PROMPTS[0], 9, 11)[0]
    command = [sys.executable, "-m", "plait", "generate", "-m", str(folder), "--ids", "3,4,5", "--seed", "11"]
    command += ["--max-tokens", "9", "--temperature", "0", "--dtype", "float32", "--max-model-len", "96"]
    command += ["--device", "cpu", "--cache-dir", str(tmp_path)]
    for _ in range(2):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert ran.stdout.split() == [str(token) for token in wanted], ran.stderr
    assert not [*tmp_path.glob("images/*.image")]
    shown = subprocess.run(
        [sys.executable, "-m", "plait", "info", "-m", str(folder)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "writes 8 tokens at a time, out of noise: in 6 passes at most" in shown.stdout
    assert any(
        line.split() == ["max_denoising_steps", "6", "generation_config.json"]
        for line in shown.stdout.splitlines()
    )


def test_a_grammar_is_refused_by_name(model: LLM) -> None:
    with pytest.raises(InvalidField, match=r"^prompt_logprobs: this model fills the places of a canvas"):
        model.generate(PROMPTS[:1], likeliest(prompt_logprobs=0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canvas_length": 0}, "canvas_length is 0; expected is a number from 1 to 1024"),
        ({"canvas_length": True}, "canvas_length is True"),
        ({"max_denoising_steps": "9"}, "max_denoising_steps is '9'"),
        ({"t_max": 3.0}, "t_max is 3.0; expected is a number from 0.001 to 1"),
        ({"t_min": 0.95}, "t_min is 0.95; expected is a number from 0 to 0.9"),
        ({"sampler_config": {"_cls_name": "Other"}}, "sampler_config is"),
        ({"t_max": 1e-30, "t_min": 1e-31}, "t_max is 1e-30"),
        ({"sampler_config": {}}, "entropy_bound is None"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold is nan"),
    ],
)
def test_configs_that_make_no_canvas_are_refused(
    tmp_path: Path, changes: Mapping[str, object], words: str
) -> None:
    config, tensors = noisy_canvases.read(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        resolved(tensors, {**config, **changes})


def test_its_spec_reaches_other_processes(tmp_path: Path) -> None:
    config, tensors = noisy_canvases.read(tmp_path)
    spec = resolved(tensors, config).spec
    assert spec.canvas == NoisyCanvasSpec(8, 6, 0.3, 0.9, 1.5, 1, 0.2)
    assert decode_spec_value(encode_spec_value(spec)) == spec


def test_an_adapter_reaches_what_places_read(folder: Path, tmp_path: Path) -> None:
    """Its rows are those of places alone, in batches with prompts."""
    tensors = load_file(folder / "model.safetensors")
    modules = [one for one in linear_modules(tensors) if "decoder" in one and "router" not in one]
    assert any("self_conditioning" in one for one in modules)
    changes = write_peft(tmp_path / "adapter", tensors, modules, lora_alpha=0.4)
    write_merged(folder, tmp_path / "merged", {name: 0.1 * change for name, change in changes.items()})
    wanted = [Oracle(tmp_path / "merged").write(prompt, 16, 11)[0] for prompt in PROMPTS]
    plain = [Oracle(folder).write(prompt, 16, 11)[0] for prompt in PROMPTS]
    assert wanted != plain
    with LLM(str(folder), **OPTIONS, max_num_seqs=8, lora=(f"a={tmp_path / 'adapter'}",)) as loaded:
        params = likeliest(max_tokens=16)
        found = [loaded.generate(PROMPTS, params, adapter=name) for name in ("a", "")]
    texts = [[list(one.outputs[0].token_ids) for one in each] for each in found]
    assert texts == [wanted, plain]


def test_rules_hold_for_the_tokens_of_the_reply(model: LLM) -> None:
    """The reply has the likeliest tokens, and no draws."""
    allowed = (5, 10, 11, 40, 41)
    found = model.generate(PROMPTS, likeliest(temperature=1.0, allowed_token_ids=allowed))
    assert {token for one in found for token in one.outputs[0].token_ids} <= {*allowed}
    free = model.generate(PROMPTS[:1], likeliest())[0].outputs[0].token_ids
    banned = tuple((token,) for token in {*free})
    (without,) = model.generate(PROMPTS[:1], likeliest(bad_word_ids=banned))
    assert not {*free} & {*without.outputs[0].token_ids}
    penalty = {"presence_penalty": 1.7, "repetition_penalty": 1.4}
    in_order = likeliest(**penalty, samplers=("penalties", "temperature"))
    assert model.generate(PROMPTS[:1], in_order)[0].outputs[0].token_ids != free
    plain = model.generate(PROMPTS[:1], likeliest(**penalty))[0].outputs[0].token_ids
    assert model.generate(PROMPTS[:1], in_order)[0].outputs[0].token_ids == plain


def test_draws_are_from_all_tokens_unless_something_says_otherwise(model: LLM) -> None:
    params = SamplingParams().resolve(model.front.generation_config)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)


def test_a_converted_file_keeps_the_schedule(folder: Path, tmp_path: Path) -> None:
    wanted = [Oracle(folder).write(prompt, 9, 11)[0] for prompt in PROMPTS]
    for target, more in (("model.gguf", ["-q", "f32"]), ("changed", ["--set", "confidence_threshold=0.21"])):
        command = [sys.executable, "-m", "plait", "convert", str(folder), str(tmp_path / target), *more]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert ran.returncode == 0, ran.stderr
        with LLM(str(tmp_path / target), **OPTIONS) as loaded:
            found = loaded.generate(PROMPTS, likeliest(max_tokens=9))
        assert [list(one.outputs[0].token_ids) for one in found] == wanted
