"""Quantized safetensors as a checkpoint of plain weights: every layout against its formula."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.errors import BadFile, MissingTensor, ShapeMismatch, UnsupportedFormat
from plait.quant.fp8 import Fp8
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight
from tests.checkpoint.quantized.packings import (
    PACKINGS,
    InMemory,
    Packing,
    bnb_four,
    e4m3,
    fp8,
    gpt_oss,
    gptq,
)

EACH = pytest.mark.parametrize("name", PACKINGS)
X = "model.layers.0.mlp.up_proj"


def stored(packing: Packing, rows: int = 64, cols: int = 192) -> tuple[InMemory, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    tensors, numbers = packing.make(rows, cols)
    return InMemory({f"{X}.{part}": tensor for part, tensor in tensors.items()}), numbers


def opened(files: InMemory, config: Any = None) -> QuantizedCheckpoint:
    return QuantizedCheckpoint(files, find_scheme({"quantization_config": config}) if config else None)


def read(checkpoint: QuantizedCheckpoint) -> Weight:
    weight = checkpoint.read(f"{X}.weight")
    assert not isinstance(weight, Tensor)
    return weight


def check(weight: Weight, numbers: np.ndarray[Any, Any]) -> None:
    assert weight.shape == numbers.shape
    found = weight.dequantize(torch.float32).double().numpy()
    np.testing.assert_allclose(found, numbers, rtol=1e-5, atol=1e-9)
    assert np.abs(numbers).max() > 1e-3  # there is something to compare


@EACH
def test_every_number_is_what_the_layouts_formula_says(name: str) -> None:
    packing = PACKINGS[name]
    files, numbers = stored(packing)
    checkpoint = opened(files, packing.config)
    assert list(checkpoint.names()) == [f"{X}.weight"]
    assert checkpoint.shape(f"{X}.weight") == (64, 192)
    assert checkpoint.format_of(f"{X}.weight") == packing.format
    weight = read(checkpoint)
    assert weight.format == packing.format
    check(weight, numbers)


@pytest.mark.parametrize("name", [name for name, packing in PACKINGS.items() if packing.outsider])
def test_tensors_alone_tell_how_they_are_packed(name: str) -> None:
    files, numbers = stored(PACKINGS[name])
    check(read(opened(files)), numbers)


@EACH
def test_weights_stay_as_small_as_they_are_stored(name: str) -> None:
    files, _ = stored(PACKINGS[name], 64, 768)
    checkpoint = opened(files, PACKINGS[name].config)
    used = sum(
        v.nbytes for k, v in files.items() if "input_" not in k and "k_scale" not in k and "_act" not in k
    )
    assert checkpoint.nbytes(f"{X}.weight") == used
    assert read(checkpoint).nbytes <= 1.1 * used + 512  # a scale of four bytes for each 32 in mxfp8


@EACH
def test_blocks_of_all_ones_and_all_zeros_are_read_too(name: str) -> None:
    packing = PACKINGS[name]
    files, _ = stored(packing)
    for byte in (0x00, 0xFF):
        codes = ("qweight", "weight_packed", "weight", "qzeros", "weight_zero_point")
        for part in (f"{X}.{code}" for code in codes):
            if part in files and files[part].dtype != torch.float8_e4m3fn:
                raw = torch.full_like(files[part].contiguous().view(torch.uint8), byte)
                files[part] = raw.view(files[part].dtype)
        assert bool(read(opened(files, packing.config)).dequantize(torch.float32).isfinite().all())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("cols", [96, 100, 36, 160])
def test_blocks_that_run_over_the_ends_of_rows(nested: bool, cols: int) -> None:
    for rows in (16, 400):
        files, numbers = stored(Packing(None, bnb_four("nf4", nested=nested), "bnb_nf4"), rows, cols)
        weight = read(opened(files))
        check(weight, numbers)
        check(weight.pick(torch.tensor([7, 3])), numbers[[7, 3]])


def test_partial_blocks_at_both_edges() -> None:
    """DeepSeek's kv_a has 576 rows: five blocks, the last of 64."""
    files, numbers = stored(Packing(None, fp8((128, 128), name="weight_scale_inv"), ""), 576, 200)
    assert files[f"{X}.weight_scale_inv"].shape == (5, 2)
    check(read(opened(files)), numbers)


def test_shards_of_rows_with_blocks_of_their_own() -> None:
    """MiMo-V2.5 has four shards of 3,392 rows, each with 27 blocks."""
    torch.manual_seed(0)
    weight, scale = e4m3(4 * 72, 192), torch.rand(4 * 3, 6) + 0.1
    files = InMemory({f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    n, k = np.indices((288, 192))
    wanted = weight.float().numpy() * scale.numpy()[n // 72 * 3 + n % 72 // 32, k // 32]
    check(read(opened(files, config)), wanted)
    files[f"{X}.weight_scale_inv"] = torch.rand(7, 6)
    with pytest.raises(ShapeMismatch, match="scales do not fit a weight of"):
        read(opened(files, config))


@pytest.mark.parametrize("rows", [128, 40])
@pytest.mark.parametrize("kind", ["blocks", "matrices"])
def test_stacked_experts_in_fp8(rows: int, kind: str) -> None:
    torch.manual_seed(0)
    name, weight = "model.layers.0.mlp.experts.gate_up_proj", e4m3(3, rows, 192)
    shape = (3, -(-rows // 128), 2) if kind == "blocks" else (3, 1, 1)
    scale = torch.rand(shape) + 0.1
    activations = {f"{name}_activation_scale": torch.ones(3)}
    checkpoint = QuantizedCheckpoint(InMemory({name: weight, f"{name}_scale_inv": scale, **activations}))
    assert list(checkpoint.names()) == [name]
    assert checkpoint.shape(name) == (3, rows, 192)
    found = checkpoint.read(name)
    assert isinstance(found, Fp8)
    block = 128 if kind == "blocks" else 1000
    e, n, k = np.indices((3, rows, 192))
    wanted = weight.float().numpy() * scale.numpy()[e, n // block, k // block]
    assert np.array_equal(found.dequantize(torch.float32).numpy(), wanted.reshape(-1, 192))


def test_experts_of_gpt_oss_are_one_stack_under_its_own_name() -> None:
    torch.manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors, numbers = gpt_oss(3, 48, 96)
    bias = torch.randn(3, 48)
    files = InMemory({name + end: tensor for end, tensor in tensors.items()} | {f"{name}_bias": bias})
    checkpoint = opened(files, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert set(checkpoint.names()) == {name, f"{name}_bias"}
    assert (checkpoint.shape(name), checkpoint.format_of(name)) == ((3, 48, 96), "mxfp4")
    weight = checkpoint.read(name)
    assert not isinstance(weight, Tensor)
    assert weight.shape == (144, 96)
    assert np.array_equal(
        weight.dequantize(torch.float32).numpy(), numbers.reshape(-1, 96).astype(np.float32)
    )
    gates = weight.pick(torch.arange(48, 96, 2)).dequantize(torch.float32).numpy()
    assert np.array_equal(gates, numbers[1, ::2].astype(np.float32))
    assert checkpoint.read(f"{name}_bias") is bias


@pytest.mark.parametrize("name", ["compressed mxfp4", "compressed nvfp4"])
def test_scales_that_are_no_numbers_are_refused_at_every_reading(name: str) -> None:
    files, _ = stored(PACKINGS[name])
    files[f"{X}.weight_scale"].view(torch.uint8)[5, 3] = 0xFF
    checkpoint = opened(files, PACKINGS[name].config)
    for _ in range(2):
        with pytest.raises(
            BadFile, match=rf"{X}.weight_scale: holds (scales that are no|numbers that are not)"
        ):
            read(checkpoint)


def test_plain_tensors_go_through_and_scales_of_activations_do_not(caplog: pytest.LogCaptureFixture) -> None:
    files, _ = stored(PACKINGS["modelopt fp8"])
    norm, bias = torch.ones(4), torch.zeros(64)
    files |= {"model.norm.weight": norm, f"{X}.bias": bias, "model.layers.0.self_attn.v_scale": torch.ones(1)}
    with caplog.at_level(logging.INFO, "plait"):
        checkpoint = opened(files, PACKINGS["modelopt fp8"].config)
    assert set(checkpoint.names()) == {f"{X}.weight", f"{X}.bias", "model.norm.weight"}
    assert checkpoint.read("model.norm.weight") is norm
    assert checkpoint.format_of(f"{X}.bias") == "float32"
    assert [r.message for r in caplog.records if "3 scales of activations" in r.message]
    with pytest.raises(MissingTensor, match="k_scale"):
        checkpoint.read(f"{X}.k_scale")


def test_a_plain_checkpoint_is_left_alone() -> None:
    names = ["a.weight", "a.scales", "mamba.dt_scales", "x_blocks", "b.absmax", "attn.k_scale", "c_scale_inv"]
    files = InMemory({name: torch.ones(3) for name in names})
    checkpoint = QuantizedCheckpoint(files)
    assert list(checkpoint.names()) == names
    assert all(checkpoint.read(name) is files[name] for name in names)


def test_fp8_without_a_scale_is_what_it_is_unless_the_config_says_it_is_quantized() -> None:
    torch.manual_seed(0)
    weight = e4m3(64, 192)
    files = InMemory({f"{X}.weight": weight})
    found = read(opened(files))
    assert (found.format, found.nbytes) == ("fp8", 64 * 192 + 4)
    assert torch.equal(found.dequantize(torch.float32), weight.float())
    with pytest.raises(BadFile, match=rf"{X}.weight: is FP8 and has no scale"):
        opened(files, {"quant_method": "fp8"})
    left_out = {"quant_method": "fp8", "modules_to_not_convert": ["up_proj"]}
    assert read(opened(files, left_out)).format == "fp8"


@pytest.mark.parametrize("group", ["3", "-1", "out of range"])
def test_an_order_of_columns_that_cannot_be_is_refused(group: str) -> None:
    files, _ = stored(PACKINGS["gptq4 by importance"])
    index = files[f"{X}.g_idx"]
    index[5] = {"3": (int(index[5]) + 1) % 6, "-1": -1, "out of range": 1 << 30}[group]
    with pytest.raises(BadFile, match=rf"{X}.g_idx: groups .* not 32 inputs in each"):
        read(opened(files))


def test_overrides_of_single_modules_count() -> None:
    config = PACKINGS["gptq4"].config | {
        "dynamic": {"+:.*up_proj": {"bits": 8, "group_size": 64}, "-:.*q_proj": {}}
    }
    files, numbers = stored(Packing(None, gptq(8, 64), "int8_g64"))
    check(read(opened(files, config)), numbers)
    del files[f"{X}.g_idx"]  # the bits are in the config alone now
    check(read(opened(files, config)), numbers)
    with pytest.raises(ShapeMismatch, match=r"qzeros.*\[3, 16\].*\[3, 8\]"):
        opened(files, PACKINGS["gptq4"].config)
    with pytest.raises(UnsupportedFormat, match="neither a g_idx nor"):
        opened(files)


def test_all_columns_of_one_group_are_no_order() -> None:
    files, numbers = stored(PACKINGS["compressed int4"])
    files[f"{X}.weight_g_idx"] = torch.full((192,), -1, dtype=torch.int32)
    weight = read(opened(files))
    assert isinstance(weight, Grouped)
    assert weight.order is None
    check(weight, numbers)


LIES: dict[str, tuple[str, str, Any, str]] = {
    "scales are missing": ("gptq4", "scales", None, "its scales are missing"),
    "zeros are missing": ("gptq4", "qzeros", None, "its qzeros is missing"),
    "scales are NaN": (
        "gptq4",
        "scales",
        lambda t: t * float("nan"),
        "scales: holds numbers that are not finite",
    ),
    "scales of another width": ("awq", "scales", lambda t: t[:, :-8], "neither GPTQ nor AWQ"),
    "zeros of another width": ("awq", "qzeros", lambda t: t[:, :-1], r"qzeros.*\[6, 7\].*\[6, 8\]"),
    "floats for words": ("awq", "qweight", lambda t: t.float(), "is float32; expected int32"),
    "no rows": ("awq", "qweight", lambda t: t[:0], "none of them 0"),
    "a group too many": ("gptq4", "scales", lambda t: torch.cat([t, t[:1]]), r"qzeros: .*\[6, 8\].*\[7, 8\]"),
    "an order too short": ("gptq4", "g_idx", lambda t: t[:-3], "no whole bits"),
    "bits against the config": (
        "gptq4",
        "g_idx",
        lambda t: t[:96],
        "the config says bits 4, its tensors show 8",
    ),
    "a shape that is huge": ("compressed int4", "weight_shape", lambda t: t * 10**9, "cannot be"),
    "a shape below zero": ("compressed int4", "weight_shape", lambda t: -t, "cannot be"),
    "a shape of three": ("compressed int4", "weight_shape", lambda t: t.repeat(2)[:3], r"\[3\].*\[2\]"),
    "no shape": ("compressed int4", "weight_shape", None, "its shape is missing"),
    "too few words": (
        "compressed int4",
        "weight_packed",
        lambda t: t[:, :-4],
        "cannot hold 192 integers of 4",
    ),
    "scales of nobody": (
        "compressed int4",
        "weight_scale",
        lambda t: t[:, :5],
        "the config says groups of 32",
    ),
    "no scale": ("compressed int4", "weight_scale", None, "its scale is missing"),
    "blocks that do not fit": (
        "fp8 in blocks",
        "weight_scale_inv",
        lambda t: t[:, :1].repeat(1, 3),
        "do not fit",
    ),
    "an infinite scale": ("fp8 static", "weight_scale", lambda t: t / 0, "not finite"),
    "exponents of NaN": ("fp8 in blocks, exponents", "weight_scale_inv", lambda t: t * 0 + 255, "no numbers"),
    "the weight is missing": ("fp8 static", "weight", None, "is not there, only"),
    "a weight of bfloat16": (
        "fp8 static",
        "weight",
        lambda t: t.bfloat16(),
        "this way of packing is not read",
    ),
    "a factor of zero": ("compressed nvfp4", "weight_global_scale", lambda t: t * 0, "is zero"),
    "a factor that is two": ("modelopt nvfp4", "weight_scale_2", lambda t: t.repeat(2), "one number"),
    "a nibble too few": ("modelopt nvfp4", "weight", lambda t: t[:, :-1], "no whole groups of 16"),
    "scales for other groups": (
        "compressed mxfp4",
        "weight_scale",
        lambda t: t[:, :-1],
        r"\[64, 5\].*\[64, 6\]",
    ),
    "a state that is no JSON": (
        "nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda t: t[:-4],
        "not valid JSON",
    ),
    "a state of a megabyte": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t.repeat(999), "4096"),
    "no state": ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "quant_state is missing"),
    "a short absmax": ("nf4", "weight.absmax", lambda t: t[:-1], r"absmax.*\[191\].*\[192\]"),
    "a table of eight": ("nf4", "weight.quant_map", lambda t: t[:8], r"quant_map.*\[8\].*\[16\]"),
    "bytes that are missing": ("nf4", "weight", lambda t: t[:-1], "in four bits"),
    "a GPU's own layout": ("bnb int8", "weight_format", lambda t: t + 2, "weight_format is not 'row'"),
    "scales for other rows": ("bnb int8", "SCB", lambda t: t[:-1], r"SCB.*\[63\].*\[64\]"),
    "int8 with nothing": ("bnb int8", "SCB", None, "this way of packing is not read"),
    "zero points of a float": (
        "compressed int4, zeros",
        "weight_zero_point",
        lambda t: t.float(),
        "is float32",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_are_missing_or_lie_are_refused_by_name(lie: str) -> None:
    name, part, change, message = LIES[lie]
    files, _ = stored(PACKINGS[name])
    files[f"{X}.{part}"] = change(files[f"{X}.{part}"]) if change else files[f"{X}.{part}"]
    if change is None:
        del files[f"{X}.{part}"]
    with pytest.raises((BadFile, ShapeMismatch, UnsupportedFormat), match=message) as found:
        read(opened(files, PACKINGS[name].config))
    assert X in str(found.value)


def test_layouts_of_others_are_refused_by_their_names() -> None:
    mlx = InMemory({f"{X}.weight": torch.ones(4, 4).int(), f"{X}.scales": torch.ones(4, 1)})
    mlx[f"{X}.biases"] = torch.ones(4, 1)
    with pytest.raises(UnsupportedFormat, match=rf"{X}: MLX is not read"):
        QuantizedCheckpoint(mlx)
    files, _ = stored(PACKINGS["awq"])
    files[f"{X}.pre_quant_scale"] = torch.ones(192)
    with pytest.raises(UnsupportedFormat, match="scales activations"):
        QuantizedCheckpoint(files)
    gemv = InMemory({f"{X}.qweight": torch.ones(64, 24).int(), f"{X}.scales": torch.ones(64, 8).half()})
    with pytest.raises(UnsupportedFormat, match=r"neither GPTQ nor AWQ \(gemm\); it is stored as"):
        QuantizedCheckpoint(gemv)
