"""`plait verify`: a table or JSON, exit code 0 only if nothing differs, and what the arithmetic promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from plait.cli.verify import arithmetic_lines, difference_lines, name_token, read_prompts, row, verdict
from plait.errors import ConfigError
from plait.kernels.load import load_kernels
from plait.ops.attention import paged_attention
from plait.ops.registry import Variant
from plait.verify.results import Arithmetic, CellResult, Difference
from plait.verify.trace import FirstDifference
from tests.families import tiny

Run = Callable[..., Any]
QUICK = ("--cpu", "--threads", "1", "--batch", "2", "--max-tokens", "2")
NATIVE = Arithmetic("cpu", "float32", "bfloat16", "300 launches", {})
LOOSE = Arithmetic("cpu", "float32", "model", "op by op", {"linear": "reference", "experts": "dense"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("verify") / "llama"
    tiny.write("llama", folder)
    return str(folder)


def test_a_sound_model_is_a_table_and_exit_code_0(plait: Run, llama: str) -> None:
    result = plait("verify", llama, *QUICK, "--quick")
    assert result.code == 0, result.err
    assert "the same bits are promised" in result.out
    for cell in ("batch of 2", "prefix cache, longer conversation", "disk cache, after a restart"):
        assert f"  {cell} " in result.out
    assert "tokens from the cache" in result.out
    assert "differences" not in result.out
    assert "no difference in" in result.out.splitlines()[-1]


def test_quick_runs_one_way_of_each_kind(plait: Run, llama: str) -> None:
    result = plait("verify", llama, "--quick", "--json", "--max-tokens", "4")
    assert result.code == 0, result.err
    assert [cell["cell"] for cell in json.loads(result.out)["cells"]] == [
        "batch of 4",
        "batch of 4, steps of 7 tokens",
        "prefix cache, longer conversation",
        "preempted, with a prefix cache",
        "right and wrong drafts, together",
        "several steps at once, together",
        "all of it at once",
        "samplers, in chunks, with a cache",
        "guidance and beams, in chunks, with a cache",
        "disk cache, after a restart",
        "restarts, together",
    ]


def test_json_has_every_cell(plait: Run, llama: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[1, 2, 3]\n\n[1, 2, 3, 4, 5]\n")
    result = plait("verify", llama, *QUICK, "--json", "--prompts", str(prompts))
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert facts["same"] is True
    assert facts["arithmetic"]["promised"] is True
    assert [asked["prompt_tokens"] for asked in facts["requests"] if asked["turn"] == 1] == [3, 5, 3, 5]
    cells = {cell["cell"]: cell for cell in facts["cells"]}
    assert cells["batch of 2"]["num_replies"] == 4
    assert cells["batch of 2"]["num_tokens"] == 8
    assert cells["right and wrong drafts, together"]["differences"] == []


def test_a_broken_kernel_is_named_and_exit_code_1(
    plait: Run, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = paged_attention.reference(*args, **kwargs)
        return out + 1e-3 if out.shape[0] > 1 else out

    load_kernels()
    variant = Variant("broken", "cpu", broken, lambda facts: None)
    monkeypatch.setattr(paged_attention, "variants", [variant, *paged_attention.variants])
    result = plait("verify", llama, *QUICK, "--quick")
    assert result.code == 1
    assert "no promise: paged_attention (broken) may round by the batch" in result.out
    assert "layer 0, attn: paged_attention differs first, at position" in result.out
    assert "(max |d| = 0.001), in a step of 2 tokens" in result.out
    assert "more (--json has them all)" in result.out


def test_a_prompt_without_a_tokenizer_is_refused_in_one_line(plait: Run, llama: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Why is the sea salty?\n")
    result = plait("verify", llama, *QUICK, "--prompts", str(prompts))
    assert result.code == 2
    assert "has no tokenizer; send token ids" in result.err
    assert result.err.count("\n") == 1


def test_what_the_matrix_sets_itself_is_no_option(plait: Run) -> None:
    shown = plait("verify", "--help").out
    for name in ("--kv-dtype", "--ops", "--quantize", "--block-size", "--prompts", "--batch"):
        assert name in shown
    for name in ("--max-num-seqs", "--prefix-cache", "--speculate", "--max-step-ms"):
        assert name not in shown


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (["m.gguf", "--tokens", "9"], "--tokens"),
        (["m.gguf", "--tp", "2", "--quick"], "--quick"),
        (["--certificate", "c.json", "--batch", "8"], "--batch"),
        (["--family", "qwen2", "--cell", "x"], "--cell"),
    ],
)
def test_an_option_that_is_not_read_is_refused(plait: Run, given: list[str], flag: str) -> None:
    result = plait("verify", *given)
    assert result.code == 2
    assert f"{flag} has no effect: " in result.err


@pytest.mark.parametrize(("text", "why"), [("[1, 2\n", "line 1"), ("\n\n", "has no prompt")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_prompts(path)


def test_lines_are_prompts_and_lists_are_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("The sea\n[4, 5]\n", encoding="utf-8")
    assert read_prompts(path) == ["The sea", [4, 5]]


def test_the_arithmetic_is_reported_honestly() -> None:
    assert "the same bits are promised" in arithmetic_lines(NATIVE)[-1]
    assert "no promise: experts (dense), linear (reference) may round" in arithmetic_lines(LOOSE)[-1]


def test_a_row_says_what_happened_or_that_nothing_did() -> None:
    swapped = CellResult("swapped", 8, 96, (), {"preemptions": 3, "swaps": 2}, proof="swaps")
    assert " ".join(row(swapped, 10).split()) == "swapped 8 96 - - 3 preemptions, 2 swaps"
    idle = CellResult("swapped", 8, 96, (), {"preemptions": 3, "swaps": 0}, proof="swaps")
    assert row(idle, 10).endswith("nothing was swapped: this shows nothing")
    drafted = CellResult("drafted", 8, 96, (), {"drafted": 9, "accepted": 4}, proof="drafted")
    assert row(drafted, 10).endswith("4 of 9 draft tokens accepted")


def test_a_difference_says_both_tokens_and_the_place() -> None:
    place = FirstDifference("layer 3, attn", "", "paged_attention", 17, 1.5e-7, 4)
    other = Difference("batch of 4", "prompt 1, greedy", 0, 2, 20, 5, 7, gap=0.0012, place=place)
    assert difference_lines(other, None) == [
        "  batch of 4: prompt 1, greedy, token 3 (position 20): 7 instead of 5; "
        "the best two logits were 0.0012 apart",
        "    layer 3, attn: paged_attention differs first, at position 17 (max |d| = 1.5e-07), "
        "in a step of 4 tokens",
    ]
    tie = replace(other, gap=1e-6, place=None)
    assert difference_lines(tie, None)[0].endswith("a near tie, the best two logits were 1e-06 apart")
    rounded = Difference("chunks", "prompt 1", 0, 0, 3, 5, 5, off_by=1e-7, note="look elsewhere")
    first, note = difference_lines(rounded, None)
    assert first.endswith("the same token, its log-probability off by 1e-07")
    assert note == "    look elsewhere"
    assert name_token(None, None) == "no token"


def test_the_verdict_counts_and_says_which_side_is_at_fault() -> None:
    other = Difference("c", "r", 0, 0, 3, 5, 7)
    rounded = Difference("c", "r", 0, 0, 3, 5, 5, off_by=1e-7)
    bad = [CellResult("c", 8, 1200, (other, rounded), {})]
    assert verdict([CellResult("c", 8, 1200, (), {})], LOOSE) == [
        "no difference in 1,200 tokens of 8 replies"
    ]
    counted, kernels = verdict(bad, NATIVE)
    assert counted.startswith("1 replies with other tokens, 1 with the same tokens and other bits: 1,200")
    assert "breaks Plait's promise" in kernels
    assert verdict(bad, LOOSE)[1].startswith("rounding by the batch: experts (dense), linear (reference); ")
