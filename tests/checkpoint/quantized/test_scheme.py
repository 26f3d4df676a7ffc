"""How checkpoints say that they are quantized: every dialect as data, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.checkpoint.quantized.scheme import Options, Scheme, find_scheme
from plait.errors import BadFile, CheckpointError, UnsupportedFormat
from tests.checkpoint.quantized.packings import compressed, gptq_config, ints

UP, Q, HEAD = "model.layers.3.mlp.up_proj", "model.layers.10.self_attn.q_proj", "lm_head"


def scheme(config: Any) -> Scheme:
    found = find_scheme({"quantization_config": config})
    assert found is not None
    return found


@pytest.mark.parametrize("config", [None, {}, {"quantization_config": None}, {"quantization_config": {}}])
def test_no_words_are_no_scheme(config: Any) -> None:
    assert find_scheme(config) is None


@pytest.mark.parametrize(
    ("config", "method", "options"),
    [
        (gptq_config(4, 128), "gptq", Options(4, 128, None, True)),
        (gptq_config(3, -1, checkpoint_format="gptq_v2"), "gptq", Options(3, 0, None, False)),
        (
            {"bits": 4, "group_size": 64, "quant_method": "GPTQ", "lm_head": True},
            "gptq",
            Options(4, 64, None, True),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "awq", Options(4, 64)),
        (
            {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128},
            "auto-round",
            Options(4, 128, None, False),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "fp8", Options(block=(128, 64))),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8", Options()),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", Options()),
        ({"quant_method": "mxfp4"}, "mxfp4", Options()),
        ({"load_in_4bit": True, "_load_in_4bit": True}, "bitsandbytes", Options()),
        ({"quant_method": "modelopt_fp4", "ignore": ["*lm_head*"]}, "modelopt", Options()),
    ],
)
def test_dialects_are_one_kind_of_data(config: Any, method: str, options: Options) -> None:
    found = scheme(config)
    assert (found.method, found.of(UP)) == (method, options)


def test_gptq_overrides_single_modules() -> None:
    dynamic = {
        r"-:.*self_attn\.q_proj": {},
        r"+:model\.layers\.[0-5]\.": {"bits": 8},
        r".*down": {"group_size": -1},
    }
    found = scheme(gptq_config(4, 128, dynamic=dynamic))
    assert found.of(Q) is None
    assert found.of(UP) == Options(8, 128, None, True)
    assert found.of("model.layers.7.mlp.down_proj") == Options(4, 0, None, True)
    assert found.of("model.layers.7.mlp.up_proj") == Options(4, 128, None, True)


def test_auto_round_leaves_single_modules_out() -> None:
    extra = {
        UP: {"bits": 8, "group_size": 32},
        HEAD: {"bits": 16, "data_type": "float"},
        ".*q_proj": {"bits": 16},
    }
    found = scheme({"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": extra})
    assert found.of(UP) == Options(8, 32, None, False)
    assert found.of(HEAD) is None
    assert found.of(Q) is None


@pytest.mark.parametrize(
    ("left_out", "module", "is_out"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.10", Q, True),
        (r"re:.*self_attn.*", Q, True),
        (r"re:self_attn.*", Q, False),
        ("*self_attn*", Q, True),
        ("model.layers.3*", UP, True),
    ],
)
def test_modules_that_are_left_out(left_out: str, module: str, is_out: bool) -> None:
    for config in (
        {"quant_method": "fp8", "modules_to_not_convert": [left_out]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [left_out]},
        {**compressed("float-quantized", num_bits=8, type="float"), "ignore": [left_out]},
    ):
        assert (scheme(config).of(module) is None) == is_out


def test_groups_of_compressed_tensors_reach_their_targets() -> None:
    config = ints(4, 128)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*self_attn\.q_proj"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    }
    config["config_groups"] = dict(sorted(config["config_groups"].items(), reverse=True))
    found = scheme({**config, "format": "mixed-precision"})
    assert found.of(UP) == Options(4, 128)
    assert found.of(Q) == Options(None, 0, (128, 128))
    assert found.of(HEAD) is None


def test_files_beside_the_weights_speak_where_the_config_is_silent(tmp_path: Path) -> None:
    for name, words, wanted in (
        ("quantize_config.json", {"bits": 8, "group_size": 32, "damp_percent": 0.1}, ("gptq", 8, 32)),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
            ("awq", 4, 64),
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
            ("modelopt", None, None),
        ),
    ):
        path = tmp_path / name
        path.write_text(json.dumps(words))
        found = find_scheme({"model_type": "llama"}, {name: path})
        assert found is not None
        assert (found.method, found.options.bits, found.options.group) == wanted
        first = find_scheme({"quantization_config": {"quant_method": "mxfp4"}}, {name: path})
        assert first is not None
        assert first.method == "mxfp4"
    nested = find_scheme({"text_config": {"compression_config": {"format": "dense", "config_groups": {}}}})
    assert nested is not None
    assert nested.method == "compressed-tensors"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"quant_method": m}, f"method '{m}' is not read")
            for m in ("quark", "hqq", "aqlm", "vptq", "torchao")
        ),
        *(
            ({"quant_method": m}, f"method '{m}' is not read; read are .*gptq")
            for m in ("bitnet", "higgs", "quanto")
        ),
        ({"anything": 1}, r"method '\(none\)' is not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not read; read are gemm"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend 'llm-awq' is not read"),
        (gptq_config(4, checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read"),
        (gptq_config(4, is_marlin_format=True), "Marlin"),
        ({**compressed("marlin-24"), "format": "marlin-24"}, "format 'marlin-24' is not read"),
        ({**compressed("dense"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (
            {**compressed("dense"), "transform_config": {"config_groups": {"u": {}}}},
            "transforms of activations",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo 'w4a16_awq' is not read"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not read"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:new"},
            "packing_format 'auto_round:new'",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        scheme(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "must be an object"),
        (gptq_config(99), "bits is 99; it must be from 2 to 8"),
        (gptq_config(4, -128), "group_size is -128"),
        ({**gptq_config(4), "bits": "four"}, "bits is 'four'"),
        ({**gptq_config(4), "bits": True}, "bits is True"),
        (gptq_config(4, dynamic={"+:(": {"bits": 8}}), "is not a regular expression"),
        (gptq_config(4, dynamic={"+:" + "a" * 600: {"bits": 8}}), "603 characters"),
        (gptq_config(4, dynamic=["x"]), "dynamic must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "two sizes"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "a list of names"),
        ({"quant_method": "fp8", "ignored_layers": [1]}, "a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 3}}, "must be an object"),
    ],
)
def test_words_that_make_no_sense_are_refused(config: Any, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        scheme(config)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *(
            "bits",
            "group_size",
            "checkpoint_format",
            "dynamic",
            "weight_block_size",
            "modules_to_not_convert",
        ),
        *("config_groups", "ignore", "format", "extra_config", "packing_format", "quantization", "version"),
    ]
)
METHODS = st.sampled_from(
    ["gptq", "awq", "auto-round", "fp8", "compressed-tensors", "modelopt", "bitsandbytes"]
)


@settings(max_examples=150, deadline=None)
@given(METHODS, st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_words_are_understood_or_refused_in_ours(method: str, words: dict[str, Any]) -> None:
    with contextlib.suppress(CheckpointError):
        scheme({**words, "quant_method": method}).of(UP)


@pytest.mark.parametrize("expression", ["(a|a)*b", "(.*)*z", "((a*)b?)*c", "(x+x+)+y", "*a*a*a*a*a*a*a*a*b"])
def test_no_expression_takes_for_ever(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.checkpoint.quantized.scheme._PATIENCE_S", 0.02)
    left_out = expression if expression.startswith("*") else f"re:{expression}"
    found = scheme({"quant_method": "fp8", "ignored_layers": [left_out]})
    with contextlib.suppress(BadFile):
        assert found.of("a" * 200 + "x" * 56) is not None
    with pytest.raises(BadFile, match="takes too long"):
        scheme({"quant_method": "fp8", "ignored_layers": ["re:(a|aa)+$"]}).of("a" * 200 + "x")
