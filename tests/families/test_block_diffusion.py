"""SDAR, its mixture and LLaDA 2: logits, and what a whole engine writes, are those of the published loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ConfigError, InvalidField, UnsupportedModel
from plait.llm.llm import LLM
from plait.request import SamplingParams
from plait.spec.canvas import CanvasSpec
from plait.spec.values import decode_spec_value, encode_spec_value
from tests.families import canvases
from tests.families.canvases import MASK, NAMES, SIZES, Oracle
from tests.families.parity import Memory, Session, decoder, resolved, worst

PROMPTS = [[3, 4, 5], [*range(1, 9)], [*range(2, 35)], [7] * 16]
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=96, max_num_seqs=4, startup_image="off", packed_cache="off"
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_under_a_mask_of_blocks(name: str, tmp_path: Path) -> None:
    config, tensors = canvases.write(name, tmp_path)
    memory, size = Memory(tensors), SIZES[name]
    found = resolved(memory, config)
    assert (found.spec.family, found.spec.canvas) == (name, CanvasSpec(size, MASK))
    assert decode_spec_value(encode_spec_value(found.spec)) == found.spec  # as other processes get it
    model, oracle = decoder(found, memory), Oracle(tmp_path, size)
    ids = [torch.arange(count) * 7 % MASK for count in (23, 17)]
    wanted = [oracle.logits(one) for one in ids]
    assert worst(run(model, ids, [max(map(len, ids))]), torch.cat(wanted)) <= 1e-4
    steps = [size] * -(-max(map(len, ids)) // size)  # each canvas in a step of its own
    assert worst(run(model, ids, steps), torch.cat(wanted)) <= 1e-4


@torch.inference_mode()
def run(model: Any, ids: list[Tensor], steps: list[int]) -> Tensor:
    """The logits of both texts, one behind the other; steps: tokens of each text in each."""
    session, done, parts = Session(model, 16), 0, [[], []]  # type: ignore[var-annotated]
    for count in steps:
        pieces = [(s, done, one[done : done + count]) for s, one in enumerate(ids) if done < len(one)]
        for (s, _, _), logits in zip(pieces, session.step(pieces), strict=True):
            parts[s].append(logits)
        done += count
    return torch.cat([*parts[0], *parts[1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDAR as files, with transformers' own next to it."""
    base = tmp_path_factory.mktemp("sdar")
    canvases.save(base / "model", *canvases.write("sdar", base))
    return base


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder / "model"), **OPTIONS) as loaded:
        yield loaded


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 21, **more})


@pytest.mark.parametrize("threshold", [0.95, 0.1])
def test_texts_are_those_of_the_published_loop(folder: Path, threshold: float) -> None:
    oracle = Oracle(folder, SIZES["sdar"])
    wanted = [oracle.fill(prompt, 21, threshold)[0] for prompt in PROMPTS]
    more = {"canvas_threshold": threshold} if threshold != 0.95 else {}
    with LLM(str(folder / "model"), **OPTIONS, **more) as loaded:
        found = loaded.generate(PROMPTS, greedy())
        assert [list(one.outputs[0].token_ids) for one in found] == wanted
        again = loaded.generate(PROMPTS[2:3], greedy())  # its prompt is cached by now
        assert again[0].num_cached_tokens == 32
        assert list(again[0].outputs[0].token_ids) == wanted[2]


def test_fewer_passes_where_the_model_is_sure(folder: Path) -> None:
    oracle = Oracle(folder, SIZES["sdar"])
    assert oracle.fill(PROMPTS[0], 21, 0.1)[1] < oracle.fill(PROMPTS[0], 21, 0.95)[1]


def test_texts_do_not_depend_on_steps(folder: Path, model: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=21, presence_penalty=0.5, n=2)
    wanted = [[tuple(one.token_ids) for one in found.outputs] for found in model.generate(PROMPTS, drawn)]
    assert len({ids for both in wanted for ids in both}) == 2 * len(PROMPTS)
    small = {**OPTIONS, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(str(folder / "model"), **small) as other:
        found = [[tuple(one.token_ids) for one in other.generate([p], drawn)[0].outputs] for p in PROMPTS]
    assert found == wanted


def test_a_reply_ends_with_its_stop_token_and_never_before_min_tokens(model: LLM) -> None:
    whole = model.generate(PROMPTS[:1], greedy(logprobs=1))[0].outputs[0]
    stop = whole.token_ids[5]
    first = whole.token_ids.index(stop)
    found = model.generate(PROMPTS[:1], greedy(stop_token_ids=[stop]))[0].outputs[0]
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:first], "stop")
    later = model.generate(PROMPTS[:1], greedy(stop_token_ids=[stop], min_tokens=9))[0].outputs[0]
    assert stop not in later.token_ids[:9]
    assert len(later.token_ids) >= 9
    assert MASK not in whole.token_ids
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids)
    assert all(token in place for token, place in zip(whole.token_ids, whole.logprobs, strict=True))


def test_no_token_is_written_where_none_is_requested(model: LLM) -> None:
    found = model.generate(PROMPTS, greedy(max_tokens=0))
    assert [one.outputs[0].finish_reason for one in found] == ["length"] * len(PROMPTS)
    assert not any(one.outputs[0].token_ids for one in found)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("use_beam_search", {"use_beam_search": True, "beam_width": 2}),
        ("mirostat", {"mirostat": 2, "temperature": 1.0}),
        ("dry_multiplier", {"dry_multiplier": 0.8}),
        ("bad_words", {"bad_word_ids": ((4, 4),)}),
    ],
)
def test_what_canvases_cannot_do_is_refused_by_name(
    model: LLM, field: str, params: Mapping[str, Any]
) -> None:
    with pytest.raises(InvalidField, match=rf"^{field}: this model fills the places of a canvas"):
        model.generate(PROMPTS[:1], greedy(**params))


def test_a_startup_image_writes_the_same(folder: Path, kernel_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").symlink_to(kernel_folder)
    wanted = Oracle(folder, SIZES["sdar"]).fill(PROMPTS[0], 9, 0.95)[0]
    command = [sys.executable, "-m", "plait", "generate", "-m", str(folder / "model"), "--ids", "3,4,5"]
    command += ["--max-tokens", "9", "--temperature", "0", "--dtype", "float32", "--max-model-len", "96"]
    command += ["--device", "cpu", "--cache-dir", str(tmp_path)]
    for _ in range(2):  # the first run keeps an image, the second begins with it
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert ran.stdout.split() == [str(token) for token in wanted], ran.stderr
    assert [*(tmp_path / "images").glob("*.image")]


def test_options_that_contradict_canvases_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="speculate: ngram is set, but this model writes 4 tokens at once"):
        LLM(str(folder / "model"), **OPTIONS, speculate="ngram")
    with pytest.raises(ConfigError, match=r"canvas_threshold: 1\.5 is no probability"):
        LLM(str(folder / "model"), **OPTIONS, canvas_threshold=1.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 6}, "block_size is 6; expected is a power of two from 2 to 256"),
        ({"block_size": "4"}, "block_size is '4'"),
        ({"block_size": 512}, "block_size is 512"),
        ({"mask_token_id": 97}, "mask_token_id is 97; expected is a token from 0 to 96"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"eos_token_id": [1, 96]}, "mask_token_id 96 is an end of texts"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window"),
    ],
)
def test_configs_that_make_no_canvas_are_refused(
    folder: Path, changes: Mapping[str, object], words: str
) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    tensors = Memory(canvases.write("sdar", folder)[1])
    with pytest.raises(UnsupportedModel, match=words):
        resolved(tensors, {**config, **changes})


def test_experts_that_a_canvas_shares_are_refused(tmp_path: Path) -> None:
    config, tensors = canvases.write("llada2_moe", tmp_path)
    with pytest.raises(UnsupportedModel, match="expert_capacity"):
        resolved(Memory(tensors), {**config, "expert_capacity": 4})
