"""Limits of `LLM` on a tiny hybrid on disk: what comes back, what is refused, what is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from plait.errors import BadFile, ConfigError, EngineError, InvalidField
from plait.llm.llm import LLM
from plait.quant.encode import find_encoder
from plait.request import SamplingParams
from tests.families import tiny
from tests.families.oxidizr.oxidizr_checkpoint import HYBRID, HYBRID_CONFIG, golden

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tensors = {name: tensor.float().contiguous() for name, tensor in golden(HYBRID).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HYBRID_CONFIG))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_num_seqs=2, max_waiting=3) as found:
        yield found


def test_more_prompts_than_may_wait_are_all_answered_in_order(llm: LLM) -> None:
    prompts = [[1 + i % 9, 2, 3] for i in range(20)]
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt_token_ids for result in results] == prompts
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert [result.outputs[0].token_ids for result in results] == alone
    several = llm.generate(prompts, SamplingParams(n=3, seed=1, max_tokens=2))
    assert [len(result.outputs) for result in several] == [3] * 20


def test_logits_scores_and_tokens_tell_the_same(llm: LLM) -> None:
    ids = [1, 5, 2, 9, 3, 7]
    logits = llm.logits(ids)
    assert logits.shape == (6, 11)
    wanted = logits.log_softmax(-1)[torch.arange(5), torch.tensor(ids[1:])]
    assert llm.score([ids])[0] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids[0] == int(logits[-1].argmax())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": "x"}, "stop: .* no tokenizer"),
        ({"stop_token_ids": (11,)}, r"stop_token_ids: token id 11 is not one of this model's 0\.\.10"),
        ({"logit_bias": {11: 1.0}}, r"logit_bias: token id 11 is not one of this model's 0\.\.10"),
    ],
)
def test_a_setting_that_could_never_take_effect_is_refused(
    llm: LLM, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidField, match=message):
        llm.generate([1, 2], SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: NoneType is neither text, a list of token ids, nor a list of those"),
        (["a", 3], "prompt 1: int is neither text nor a list of token ids"),
        ([[1], None], "prompt 1: NoneType is neither"),
        ([{"prompt": "a"}], "prompt 0: dict is neither"),
    ],
)
def test_a_prompt_of_another_type_is_refused_by_its_place(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        llm.generate(prompt)


def test_an_option_that_does_not_exist_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match="layers_on_gpu: there is no such option; there are device, dtype"):
        LLM(str(model), layers_on_gpu=0.9)


def test_an_option_that_does_not_exist_names_the_nearest_first(model: Path) -> None:
    wanted = "gpu_memory_utilization: there is no such option, did you mean gpu_memory[?]; there are device"
    with pytest.raises(ConfigError, match=wanted):
        LLM(str(model), gpu_memory_utilization=0.9)


def test_a_template_without_a_tokenizer_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template: 'chatml' needs a tokenizer"):
        LLM(str(model), device="cpu", chat_template="chatml")


def test_limits_of_control_groups_bound_threads_and_memory_and_are_logged(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.resource_limits.physical_cores", lambda *_: 4)
    monkeypatch.setattr("plait.resource_limits.usable_cpus", lambda: 4)
    monkeypatch.setattr("plait.resource_limits.cpu_quota", lambda *_: 1.9)
    monkeypatch.setattr("plait.resource_limits._memory", lambda *_: [(1 << 30, 1 << 29)])
    before, limited = set(threading.enumerate()), {"device": "cpu", "max_num_seqs": 1, "prefix_cache": False}
    with caplog.at_level("INFO", logger="plait"), LLM(str(model), **limited):
        assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("plait-cpu")]
    assert "threads: 1 (4 physical cores, a CPU quota of 1.9)" in caplog.text
    assert "control groups allow 1 GiB; 512 MiB can still be had" in caplog.text
    with LLM(str(model), **limited, threads=2):
        assert "threads: 2 threads share a CPU quota of 1.9" in caplog.text


def test_a_vocabulary_that_is_not_the_models_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        LLM(str(model), device="cpu", vocab="cl100k_base") as other,
        pytest.raises(InvalidField, match=r"cl100k_base writes it with token .* has 0\.\.10; .*--vocab"),
    ):
        other.generate("hello")
    assert "the vocabulary cl100k_base has 100331 tokens and the model only 11" in caplog.text


def test_deterministic_is_kept_or_refused(model: Path, llm: LLM) -> None:
    with LLM(str(model), device="cpu", deterministic=True) as other:
        assert "one call" in other.step_kind
        (info,) = (f for f in other.front.loop.registry.collect() if f.name == "plait_step_info")
        assert other.step_kind.startswith(info.samples[0].labels["kind"])
        assert other.generate([1, 2], GREEDY)[0].outputs == llm.generate([1, 2], GREEDY)[0].outputs
    with pytest.raises(ConfigError, match=r"deterministic: on cpu this model runs .*linear \(reference\)"):
        LLM(str(model), device="cpu", deterministic=True, ops="reference")


def test_closing_leaves_no_thread_and_takes_nothing_more(model: Path) -> None:
    before = set(threading.enumerate())
    closed = LLM(str(model), device="cpu")
    closed.generate([1, 2], GREEDY)
    closed.close()
    closed.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(EngineError, match="takes no more requests"):
        closed.generate([1, 2], GREEDY)


def test_the_models_own_penalty_is_what_is_not_requested(model: Path, llm: LLM, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "repetition_penalty": 5.0}')
    with LLM(str(tmp_path), device="cpu") as other:
        penalised = other.generate([1, 2, 3], SamplingParams(max_tokens=6))[0].outputs[0].token_ids
        plain = other.generate([1, 2, 3], SamplingParams(max_tokens=6, repetition_penalty=1.0))
    asked = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=5.0)
    assert penalised == llm.generate([1, 2, 3], asked)[0].outputs[0].token_ids
    assert plain[0].outputs[0].token_ids == llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(BadFile, match=r"generation_config\.json of .*: temperature: 'hot'"):
        LLM(str(tmp_path), device="cpu")


def test_tokens_that_the_model_suppresses_are_in_no_reply(
    model: Path, llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    plain = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    config = {"suppress_tokens": [plain[0]], "bad_words_ids": [[plain[1]]], "no_repeat_ngram_size": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), device="cpu") as other:
        greedy = other.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
        drawn = other.generate([1, 2, 3], SamplingParams(max_tokens=40, temperature=2.0, top_k=0, top_p=1.0))
    assert not {*greedy, *drawn[0].outputs[0].token_ids} & {*plain[:2]}
    assert "no_repeat_ngram_size = 3, not read" in caplog.text
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [500]}')
    with pytest.raises(BadFile, match="suppress_tokens has 500, and it lists token ids from 0 to 10"):
        LLM(str(tmp_path), device="cpu")


def test_a_program_that_ends_in_the_middle_of_a_step_ends_in_order(nano_hybrid: Path) -> None:
    program = (
        "import sys, time; from plait import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu', max_num_batched_tokens=4000)\n"
        "for _ in range(8): llm.front.submit(llm.front.prepare([5] * 500, SamplingParams(max_tokens=9)))\n"
        "time.sleep(0.1); print('ended')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(nano_hybrid)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_what_must_be_a_list_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidField, match=f"{field}: 5 is not a list"):
        SamplingParams(**{field: 5})  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [5, {"prompt": "text"}])
def test_what_is_not_a_prompt_is_refused(nano_hybrid: Path, prompt: object) -> None:
    with LLM(str(nano_hybrid), device="cpu") as llm, pytest.raises(InvalidField, match="neither text"):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_a_short_context_takes_the_short_factors_of_longrope(tmp_path: Path) -> None:
    tiny.write("llama_longrope", tmp_path)  # original length 16
    ids = [1, 5, 2, 9, 3, 7, 4, 4, 8, 6]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]  # transformers: short factors for a short prompt
    with LLM(str(tmp_path), device="cpu", ops="reference", max_model_len=16) as short:
        torch.testing.assert_close(short.logits(ids), wanted, atol=1e-5, rtol=1e-4)
    with LLM(str(tmp_path), device="cpu", ops="reference", max_model_len=17) as long:
        assert (long.logits(ids) - wanted).abs().max() > 1e-3


def test_reference_ops_are_the_plain_formulas_of_decoded_weights(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    decoded = {name: through_q8_0(w) if is_linear(name) else w for name, w in stored.items()}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    plain.load_state_dict(decoded, strict=False)
    ids = [1, 5, 2, 9, 3, 7, 4, 4]
    with torch.no_grad():
        wanted = plain(torch.tensor([ids])).logits[0]
    with LLM(str(tmp_path), device="cpu", ops="reference", quantize="q8_0") as reference:
        torch.testing.assert_close(reference.logits(ids), wanted, atol=1e-5, rtol=1e-4)


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") or name == "lm_head.weight"


def through_q8_0(weight: torch.Tensor) -> torch.Tensor:
    encode = find_encoder("q8_0", weight.shape[1])
    return encode(weight).dequantize(torch.float32) if encode else weight
