"""What public libraries pack and decode, read by ours: compressed-tensors, and transformers' own decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.quant.weight import Weight
from tests.checkpoint.quantized.packings import InMemory, compressed, e4m3, gpt_oss
from tests.lazy_modules import import_lazily

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

compressors = import_lazily("compressed_tensors.compressors")
quantization = import_lazily("compressed_tensors.quantization")

ROWS, COLS = 48, 192
INT: dict[str, Any] = {"type": "int", "strategy": "group", "group_size": 32}
FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int{b}": ("pack-quantized", {**INT, "num_bits": b}) for b in range(2, 9)},
    **{f"int{b}, zeros": ("pack-quantized", {**INT, "num_bits": b, "symmetric": False}) for b in (3, 4, 8)},
    "int4 by row": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 for all": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8, zeros": ("naive-quantized", {**INT, "num_bits": 8, "symmetric": False}),
    "fp8 for all": ("float-quantized", {**FLOAT, "strategy": "tensor"}),
    "fp8 by row": ("float-quantized", {**FLOAT, "strategy": "channel"}),
    "fp8 in blocks": ("naive-quantized", {**FLOAT, "strategy": "block", "block_structure": [16, 64]}),
    "mxfp8": ("mxfp8-quantized", {**FLOAT, "strategy": "group", "group_size": 32}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def scale_shape(args: QuantizationArgs) -> tuple[int, ...]:
    match args.strategy:
        case "tensor":
            return (1,)
        case "channel":
            return (ROWS, 1)
        case "block":
            assert args.block_structure is not None
            return (ROWS // args.block_structure[0], COLS // args.block_structure[1])
        case _:
            assert args.group_size is not None
            return (ROWS, COLS // args.group_size)


def module(args: QuantizationArgs) -> dict[str, Tensor]:
    """A weight with scales of about the right size, as a quantizer would find them."""
    torch.manual_seed(0)
    weight, shape = torch.randn(ROWS, COLS), scale_shape(args)
    top = {"int": 2 ** (args.num_bits - 1), "float": 448 if args.num_bits == 8 else 6}[args.type]
    found = {"weight": weight, "weight_scale": (3 + torch.rand(shape)) / top}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = torch.tensor([100.0])
        found["weight_scale"] = (found["weight_scale"] * 100).to(torch.float8_e4m3fn).float()
    elif args.group_size == 32 and args.type == "float":
        found["weight_scale"] = 2.0 ** found["weight_scale"].log2().round()
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        found["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(name: str) -> None:
    format_, words = CASES[name]
    args = quantization.QuantizationArgs(**words)
    scheme, library = (
        quantization.QuantizationScheme(targets=["Linear"], weights=args),
        compressors.BaseCompressor.get_value_from_registry(format_),
    )
    stored = library.compress(module(args), scheme)
    wanted = library.decompress(dict(stored), scheme)["weight"]
    files = InMemory({f"model.layers.0.mlp.up_proj.{part}": value for part, value in stored.items()})
    alone = () if "block_structure" in words else (None,)  # 16 x 64 is nothing that shapes could tell
    for config in (compressed(format_, **words), *alone):
        told = find_scheme({"quantization_config": config} if config else None)
        weight = QuantizedCheckpoint(files, told).read("model.layers.0.mlp.up_proj.weight")
        assert isinstance(weight, Weight)
        assert not isinstance(weight, Tensor)
        torch.testing.assert_close(
            weight.dequantize(torch.float32),
            wanted.float(),
            rtol=1e-6 if wanted.dtype == torch.float32 else 1e-2,
            atol=1e-7,
        )


def test_stacks_of_gpt_oss_are_what_transformers_decodes() -> None:
    torch.manual_seed(0)
    parts, _ = gpt_oss(3, 64, 96)
    for byte in (None, 0x00, 0xFF, 0x80, 0x7F):
        blocks = parts["_blocks"] if byte is None else torch.full_like(parts["_blocks"], byte)
        scales = torch.randint(100, 140, parts["_scales"].shape, dtype=torch.uint8)
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        weight = QuantizedCheckpoint(
            InMemory({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales})
        )
        found = weight.read("experts.down_proj")
        assert not isinstance(found, Tensor)
        assert torch.equal(found.dequantize(torch.float32), wanted.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_fp8_are_what_transformers_decodes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, scale = e4m3(256, 384), (2.0 ** torch.randint(-9, 3, (2, 3))).to(dtype)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    files = InMemory({"X.weight": weight, "X.weight_scale_inv": scale})
    found = QuantizedCheckpoint(files).read("X.weight")
    assert not isinstance(found, Tensor)
    assert torch.equal(found.dequantize(torch.float32), wanted)
