"""`plait info`: the same facts for a reader and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.info import shorten, source_lines, step_lines
from plait.cli.model_facts.bound_ops import group_bindings, op_lines
from plait.cli.model_facts.tables import columns
from plait.ops.registry import Binding
from tests.families import tiny, tiny_bare

Run = Callable[..., Any]


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert columns([("a", "bbb", "c"), ("aa", "b", "")]) == ["  a   bbb  c", "  aa  b"]


def test_a_long_value_says_what_is_cut() -> None:
    assert shorten(["mamba"] * 40) == "[… 40 values]"
    assert shorten("x" * 90).endswith("…")
    assert shorten(1e-5) == "1e-05"


def test_sources_are_next_to_their_values() -> None:
    sources = {"hidden_size": {"value": 64, "source": "tensor embed.weight"}}
    assert source_lines(sources) == ["  hidden_size  64  tensor embed.weight"]


def test_ops_say_why_not_the_faster_one() -> None:
    slow = Binding("linear", "reference", "layers.0.attn.q", (("amx", "no amx here"),))
    fast = Binding("rms_norm", "avx512", "layers.0.norm", ())
    lines = op_lines(group_bindings([slow, slow, fast]))
    assert lines == [
        "  linear    reference  × 2  not amx: no amx here",
        "  rms_norm  avx512     × 1  nothing faster is there",
    ]


def test_info_shows_what_a_fused_op_replaces(plait: Run, nano_hybrid: Path) -> None:
    result = plait("info", str(nano_hybrid), "--cpu", "--ops", "--no-fuse", "glu", "--no-fuse", "causal_conv")
    assert result.code == 0, result.err
    rows = {" ".join(line.split()[:2]): line for line in result.out.splitlines() if line.split()}
    assert "fuses combine, rms_norm" in rows["add_rms_norm native"]
    assert "fuses linear, activate, multiply; not native: --no-fuse names it" in rows["glu composition"]
    assert "causal_conv composition" in rows
    assert "causal_conv native" in rows


def test_a_real_model_is_described_from_its_headers(plait: Run, smollm2: Path) -> None:
    result = plait("info", str(smollm2), "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert facts["spec"]["hidden_size"] == 576
    assert facts["checkpoint"]["parameters"] == pytest.approx(134.5e6, rel=0.01)
    assert sum(len(group["indices"]) for group in facts["layers"]) == 30
    (row,) = [row for row in facts["memory"]["sequence"] if row["tokens"] == 1024]
    assert row["nbytes"] == 1024 * 30 * 2 * 3 * 64 * 2  # layers × (k, v) × kv heads × head dim × bfloat16
    assert facts["memory"]["kv_dtype"] == "bfloat16"
    assert all(entry["source"] for entry in facts["sources"].values())


def test_its_memory_is_what_keys_and_values_are_kept_in(plait: Run, smollm2: Path) -> None:
    result = plait("info", str(smollm2), "--json", "--kv-dtype", "int8")
    facts = json.loads(result.out)
    (row,) = [row for row in facts["memory"]["sequence"] if row["tokens"] == 1024]
    assert row["nbytes"] == 1024 * 30 * 3 * (
        64 + 2 * 2 + 64 + 2
    )  # a code for each number, scales: two of a key, one of a value
    assert "keys and values int8" in plait("info", str(smollm2), "--kv-dtype", "int8").out


def test_a_real_model_is_described_in_words(plait: Run, smollm2: Path) -> None:
    result = plait("info", "--model", str(smollm2))
    assert result.code == 0, result.err
    assert "9 heads × 64, 3 kv" in result.out
    assert "layers (30)" in result.out
    assert "context 8192" in result.out


def test_a_missing_model_is_one_line(plait: Run, tmp_path: Path) -> None:
    result = plait("info", str(tmp_path / "nowhere"))
    assert result.code in (2, 3)
    assert "nowhere" in result.err
    assert result.err.count("\n") == 1


def test_a_hybrid_is_described_layer_by_layer(plait: Run, nano_hybrid: Path) -> None:
    result = plait("info", str(nano_hybrid))
    assert result.code == 0, result.err
    for words in (
        "0-1, 3-4  ssm: Mamba2",
        "2, 5      attn: MLA",
        "MoE, 2 of 4 experts",
        "config.json",
        "tensor ",
    ):
        assert words in result.out


def test_a_model_without_a_config_shows_where_every_value_came_from(plait: Run, tmp_path: Path) -> None:
    tiny.write("kimi_linear", tmp_path, tiny_bare.VARIANTS["kimi_linear"])
    (tmp_path / "config.json").unlink()
    result = plait("info", str(tmp_path))
    assert result.code == 0, result.err
    for words in (
        "0  delta: Kimi delta attention, 3 heads × (8 × 8)",
        "attn: MLA, 4 heads × (8 + 4)",
        "no rope",
        "tensor model.layers.1.self_attn.kv_a_layernorm.weight [16]",
        "default (usual for 8 experts; --set num_experts_per_tok=…)",
        "default (kimi_linear)",
    ):
        assert words in result.out, words
    changed = json.loads(plait("info", str(tmp_path), "--json", "--set", "num_experts_per_tok=3").out)
    assert changed["sources"]["num_experts_per_tok"] == {"value": 3, "source": "--set"}


def test_a_model_of_longrope_says_which_factors_it_gets(plait: Run, tmp_path: Path) -> None:
    tiny.write("llama_longrope", tmp_path)
    assert "the long factors of longrope at every length" in plait("info", str(tmp_path)).out
    short = json.loads(plait("info", str(tmp_path), "--json", "--max-model-len", "16").out)["notes"]
    assert short == ["rope: the short factors of longrope, because no sequence passes 16 tokens"]


def test_info_says_first_whether_the_model_fits(plait: Run, nano_hybrid: Path) -> None:
    lines = plait("info", str(nano_hybrid), "--max-num-seqs", "8").out.splitlines()
    assert lines[1].startswith("  fits: yes; ")
    assert lines[2].startswith("  memory with so many users of 512 tokens each: 1: ")
    assert lines[3].startswith("  kernels: native, compiled for ")
    found = json.loads(plait("info", str(nano_hybrid), "--json", "--max-num-seqs", "8").out)
    users, state = found["fit"]["users"], found["memory"]["sequence"][-1]["nbytes"]
    assert [row["users"] for row in users] == [1, 4, 8]
    assert [row["nbytes"] - found["checkpoint"]["nbytes"] for row in users] == [state, 4 * state, 8 * state]
    lines = plait("info", str(nano_hybrid), "--memory-limit", "100000GiB").out.splitlines()
    assert lines[1].startswith("  fits: no: memory_limit: ")
    lines = plait("info", str(nano_hybrid), "--memory-limit", "1KiB").out.splitlines()
    assert lines[1].startswith("  fits: no: the state of one sequence")


def test_ops_of_an_example_gpu_need_no_gpu(plait: Run, nano_hybrid: Path) -> None:
    asked = ("info", str(nano_hybrid), "--ops", "--device", "cuda:sm_90")
    result = plait(*asked, "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    step, ops = facts["step"], {row["op"]: row for row in facts["ops"]}
    assert ops["paged_latent_attention"]["variant"] == "triton"
    assert {"largest", "sample"} <= ops.keys()
    assert not any(row["variant"].startswith("native") for row in facts["ops"])
    assert (step["chip"], step["sequences"]) == ("an sm_90 as H200", 2)
    assert step["launches"] == sum(step["kernels"].values()) > 0
    assert facts["fit"]["device"] == "cuda"
    assert facts["fit"]["free"] == 141 << 30
    assert facts["memory"]["dtype"] == "bfloat16", "a GPU computes in it where weights are stored so"
    text = plait(*asked).out
    assert "a decode step of 2 sequences on an sm_90 as H200" in text
    assert f"  {step['launches']} launches; " in text
    assert "no run on a GPU is recorded yet" in text


@pytest.mark.parametrize("command", ["generate", "info"])
def test_an_example_gpu_is_refused_by_name_where_a_model_has_to_run(
    plait: Run, nano_hybrid: Path, command: str
) -> None:
    if command == "info":
        result = plait("info", str(nano_hybrid), "--ops", "--device", "cuda:sm_61")
        assert "cuda:sm_61 is no example of a GPU; there are cuda:sm_75, cuda:sm_80" in result.err
    else:
        result = plait("generate", str(nano_hybrid), "-p", "hi", "--device", "cuda:sm_90")
        assert "cuda:sm_90 is an example of a GPU: `plait info MODEL --ops` alone takes it" in result.err
    assert result.code == 2


def test_steps_say_what_prevents_a_graph() -> None:
    step = {"launches": 3, "kernels": {"mul": 2, "attend": 1}, "faults": {"ops/moe.py:96: item": 2}}
    assert step_lines({**step, "no_step": None}) == [
        "  3 launches; 1 place prevents one graph",
        "  mul     × 2",
        "  attend  × 1",
        "  not capturable: ops/moe.py:96: item (× 2)",
    ]
    assert step_lines({"no_step": "whole sequences"}) == ["  none: whole sequences"]


def test_ranks_are_shown_with_what_lies_where_and_what_they_exchange(
    plait: Run, nano_hybrid: Path, smollm2: Path
) -> None:
    facts = json.loads(plait("info", str(nano_hybrid), "--tp", "2", "--json").out)["ranks"]
    assert [rank["layers"] == facts["ranks"][0]["layers"] for rank in facts["ranks"]] == [True, True]
    assert "Mamba2, 4 heads" in facts["ranks"][0]["layers"][0]["branches"][0]  # of eight
    assert all(0.5 < rank["share"] < 0.65 for rank in facts["ranks"])  # embeddings are on both
    # A sum for each of eight branches; the logits, and for each of four gated norms outputs and gates.
    assert (facts["sums"], facts["gathers"], facts["shares"]) == (8, 9, 2)
    assert facts["sums_nbytes_per_token"] == 8 * 256 * 4  # of the hidden size, in float32
    assert facts["logits_nbytes_per_row"] == 4096 * 4
    text = plait("info", str(nano_hybrid), "--tp", "2").out
    assert "on 2 ranks" in text
    assert "a step: 8 sums over ranks, 9 gathers" in text
    assert "a token: at most 8.0 KiB of sums in float32; a row of logits: 16.0 KiB" in text
    refused = plait("info", str(smollm2), "--tp", "2")
    assert refused.code == 2
    assert "layers.0.attn: 9 heads cannot be divided equally among 2" in refused.err


def test_info_names_the_family_and_of_which_layer_keys_are_read(plait: Run, tmp_path: Path) -> None:
    tiny.write("gemma4_e2b", tmp_path)
    shown = plait("info", str(tmp_path))
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0].endswith(": gemma4_text")
    assert "keys and values of layers.2.attn" in shown.out
    assert "input of its own, 12" in shown.out
