"""Quantized weights as their exporters store them, of random bits, and what each number is by its formula.

The decoders know nothing of the package: they compute every number on its own, from the published layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Numbers = np.ndarray[Any, np.dtype[Any]]
AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = [
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
]
FP4 = [x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)]


@dataclass(frozen=True)
class Packing:
    """One way to store a weight. `make(rows, cols)`: (its tensors by the ends of their names, numbers)."""

    config: Mapping[str, Any] | None
    make: Callable[[int, int], tuple[Tensors, Numbers]]
    format: str
    outsider: bool = False  # also without its config


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16, size: float = 0.02) -> Tensor:
    return (size * (0.5 + torch.rand(shape))).to(dtype)


def e4m3(*shape: int, top: int = 0x7F) -> Tensor:
    """Random E4M3 numbers; `top`: bytes of magnitude stay below it."""
    magnitude = torch.randint(0, top, shape, dtype=torch.uint8)
    return (magnitude | (torch.randint(0, 2, shape, dtype=torch.uint8) << 7)).view(torch.float8_e4m3fn)


def e4m3_numbers(stored: Tensor) -> Numbers:
    raw = stored.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, fraction = 1.0 - 2 * (raw >> 7), raw >> 3 & 15, raw & 7
    small = fraction / 8 * 2.0**-6
    return np.asarray(sign * np.where(exponent == 0, small, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)))


def field(packed: Tensor, first_bit: Numbers, bits: int, line: Numbers) -> Numbers:
    """`bits` bits from `first_bit` on of a line of 32-bit words: packed [words, lines]."""
    raw = packed.numpy().astype(np.int64) & 0xFFFFFFFF
    word, shift = first_bit // 32, first_bit % 32
    after = np.minimum(word + 1, len(raw) - 1)
    both = raw[word, line] | np.where(word + 1 < len(raw), raw[after, line], 0) << 32
    return np.asarray(both >> shift & (2**bits - 1))


def gptq(
    bits: int, group: int = 32, *, v2: bool = False, ordered: bool = False, middle: bool = False
) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        size = group if group > 0 else cols
        groups = -(-cols // size)
        g_idx = torch.arange(cols, dtype=torch.int32) // size
        if ordered:
            g_idx = g_idx[torch.randperm(cols)]
        qzeros = words(groups, rows * bits // 32)
        if middle:  # symmetric files of four bits: 7 is stored for 8
            qzeros = torch.full_like(qzeros, 0x77777777)
        tensors = {
            "qweight": words(cols * bits // 32, rows),
            "qzeros": qzeros,
            "scales": scales(groups, rows, size=0.3 / 2**bits),
            "g_idx": g_idx,
        }
        n, k = np.indices((rows, cols))
        g = g_idx.numpy()[k]
        q = field(tensors["qweight"], k * bits, bits, n)
        z = field(qzeros.t().contiguous(), n * bits, bits, g)
        zero = z if v2 else (z + 1) % 2**bits
        return tensors, tensors["scales"].float().numpy()[g, n] * (q - zero)

    return make


def awq(group: int = 32) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        groups = cols // group
        tensors = {
            "qweight": words(cols, rows // 8),
            "qzeros": words(groups, rows // 8),
            "scales": scales(groups, rows),
        }
        n, k = np.indices((rows, cols))
        shift = 4 * AWQ[n % 8]
        q = tensors["qweight"].numpy().astype(np.int64)[k, n // 8] >> shift & 15
        z = tensors["qzeros"].numpy().astype(np.int64)[k // group, n // 8] >> shift & 15
        return tensors, tensors["scales"].float().numpy()[k // group, n] * (q - z)

    return make


def fp8(
    block: tuple[int, int] | None,
    *,
    name: str = "weight_scale",
    more: tuple[str, ...] = (),
    bytes_: bool = False,
) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    """block None: one scale for all, without dimensions; (1, 0): one for each row, [rows, 1]."""

    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        size = (rows, cols) if block is None else (block[0] or rows, block[1] or cols)
        shape = (-(-rows // size[0]), -(-cols // size[1]))
        weight, scale = e4m3(rows, cols, top=0x50), scales(*shape, dtype=torch.float32, size=0.03)
        numbers = scale.numpy()
        if bytes_:
            scale = torch.randint(118, 124, shape, dtype=torch.uint8)
            numbers = 2.0 ** (scale.numpy() - 127.0)
        n, k = np.indices((rows, cols))
        wanted = e4m3_numbers(weight) * numbers[n // size[0], k // size[1]]
        tensors = {"weight": weight, name: scale.reshape(()) if block is None else scale}
        return tensors | {extra: torch.tensor(0.5) for extra in more}, wanted

    return make


def packed_integers(
    bits: int, group: int = 32, *, zeros: bool = False, ordered: bool = False
) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        size = group or cols
        groups = -(-cols // size)
        g_idx = torch.arange(cols, dtype=torch.int32) // size
        tensors = {
            "weight_packed": words(rows, -(-cols * bits // 32)),
            "weight_scale": scales(rows, groups, dtype=torch.bfloat16, size=0.3 / 2**bits),
            "weight_shape": torch.tensor([rows, cols]),
        }
        if ordered:
            tensors["weight_g_idx"] = g_idx = g_idx[torch.randperm(cols)]
        n, k = np.indices((rows, cols))
        g = g_idx.numpy()[k]
        q = field(tensors["weight_packed"].t().contiguous(), k * bits, bits, n) - 2 ** (bits - 1)
        z = np.zeros_like(q)
        if zeros:
            tensors["weight_zero_point"] = words(-(-rows * bits // 32), groups)
            z = field(tensors["weight_zero_point"], n * bits, bits, g) - 2 ** (bits - 1)
        return tensors, tensors["weight_scale"].float().numpy()[n, g] * (q - z)

    return make


def int8(group: int | None = 0, *, zeros: bool = False) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    """group None: one scale for all; 0: one for each row."""

    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        size = group or cols
        shape = (1,) if group is None else (rows, cols // size)
        q = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
        tensors = {"weight": q, "weight_scale": scales(*shape, dtype=torch.bfloat16, size=0.002)}
        n, k = np.indices((rows, cols))
        at = (n * 0,) if group is None else (n, k // size)
        z = np.zeros((rows, cols))
        if zeros:
            tensors["weight_zero_point"] = torch.randint(-128, 128, shape, dtype=torch.int8)
            z = tensors["weight_zero_point"].numpy().astype(np.int64)[at]
        return tensors, tensors["weight_scale"].float().numpy()[at] * (q.numpy().astype(np.int64) - z)

    return make


def nibbles(codes: Tensor, n: Numbers, k: Numbers) -> Numbers:
    """The even column is the low nibble."""
    return np.asarray(codes.numpy().astype(np.int64)[n, k // 2] >> 4 * (k % 2) & 15)


def nvfp4(*, modelopt: bool) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
        scale = e4m3(rows, cols // 16).view(torch.uint8) & 0x7F
        scale = scale.view(torch.float8_e4m3fn)
        n, k = np.indices((rows, cols))
        numbers = E2M1[nibbles(codes, n, k)] * e4m3_numbers(scale)[n, k // 16]
        if modelopt:
            tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(0.0005)}
            return tensors | {"input_scale": torch.tensor(0.1)}, numbers * float(np.float32(0.0005))
        tensors = {
            "weight_packed": codes,
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([2000.0]),
        }
        return tensors | {"input_global_scale": torch.tensor([3.0])}, numbers / 2000

    return make


def mxfp4(rows: int, cols: int) -> tuple[Tensors, Numbers]:
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    scale = torch.randint(118, 124, (rows, cols // 32), dtype=torch.uint8)
    n, k = np.indices((rows, cols))
    numbers = E2M1[nibbles(codes, n, k)] * 2.0 ** (scale.numpy()[n, k // 32] - 127.0)
    return {"weight_packed": codes, "weight_scale": scale}, numbers


def mxfp4_of_mimo(rows: int, cols: int) -> tuple[Tensors, Numbers]:
    """As experts of MiMo-V2.6, next to weights in FP8."""
    tensors, numbers = mxfp4(rows, cols)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, numbers


def gpt_oss(experts: int, rows: int, cols: int) -> tuple[Tensors, Numbers]:
    """A stack: _blocks [experts, rows, cols / 32, 16] and _scales; numbers [experts, rows, cols]."""
    blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
    scale = torch.randint(118, 124, (experts, rows, cols // 32), dtype=torch.uint8)
    e, n, k = np.indices((experts, rows, cols))
    byte = blocks.numpy().astype(np.int64)[e, n, k // 32, k % 32 // 2]
    numbers = E2M1[byte >> 4 * (k % 2) & 15] * 2.0 ** (scale.numpy()[e, n, k // 32] - 127.0)
    return {"_blocks": blocks, "_scales": scale}, numbers


def bnb_four(
    kind: str, *, nested: bool = False, block: int = 64
) -> Callable[[int, int], tuple[Tensors, Numbers]]:
    """The first number of a byte is its high nibble; blocks run over all rows, flattened."""

    def make(rows: int, cols: int) -> tuple[Tensors, Numbers]:
        count = rows * cols
        blocks = -(-count // block)
        codes = torch.randint(0, 256, (count // 2, 1), dtype=torch.uint8)
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, cols]}
        tensors = {"weight": codes, "weight.quant_map": table}
        if nested:
            absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            inner, map_ = (
                scales(-(-blocks // 256), dtype=torch.float32, size=0.05),
                torch.linspace(-0.9, 1, 256),
            )
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
            tensors |= {"weight.nested_absmax": inner, "weight.nested_quant_map": map_}
            b = np.arange(blocks)
            sizes = map_.numpy()[absmax.numpy()] * inner.numpy()[b // 256] + 0.125
        else:
            absmax = scales(blocks, dtype=torch.float32, size=0.3)
            sizes = absmax.numpy()
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {"weight.absmax": absmax, f"weight.quant_state.bitsandbytes__{kind}": text}
        i = np.arange(count)
        index = codes.numpy().astype(np.int64)[i // 2, 0] >> np.where(i % 2 == 0, 4, 0) & 15
        return tensors, (table.numpy()[index] * sizes[i // block]).reshape(rows, cols)

    return make


def bnb_eight(rows: int, cols: int) -> tuple[Tensors, Numbers]:
    q, scb = (
        torch.randint(-127, 128, (rows, cols), dtype=torch.int8),
        scales(rows, dtype=torch.float32, size=0.3),
    )
    tensors = {"weight": q, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q.numpy().astype(np.int64) * scb.numpy()[:, None] / 127


def gptq_config(bits: int, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **more}


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def ints(bits: int, group: int = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group" if group else "channel", **more}
    return compressed("pack-quantized", **weights, group_size=group or None, symmetric=symmetric)


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "iters": 200}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

PACKINGS: dict[str, Packing] = {
    **{f"gptq{b}": Packing(gptq_config(b), gptq(b), f"int{b}_g32", outsider=True) for b in (2, 3, 4, 8)},
    "gptq4 v2": Packing(gptq_config(4, checkpoint_format="gptq_v2"), gptq(4, v2=True), "int4_g32"),
    "gptq4 by importance": Packing(gptq_config(4, desc_act=True), gptq(4, ordered=True), "int4_g32", True),
    "gptq3 by importance": Packing(gptq_config(3, desc_act=True), gptq(3, ordered=True), "int3_g32", True),
    "gptq4 whole rows": Packing(gptq_config(4, -1), gptq(4, -1), "int4", True),
    "gptq4 symmetric": Packing(gptq_config(4), gptq(4, middle=True), "int4_g32", True),
    "awq": Packing(AWQ_CONFIG, awq(), "int4_g32", True),
    "auto-round, its own": Packing(ROUND, gptq(4, v2=True), "int4_g32"),
    "auto-round as gptq": Packing({**ROUND, "packing_format": "auto_round:auto_gptq"}, gptq(4), "int4_g32"),
    "auto-round as awq": Packing({**ROUND, "packing_format": "auto_round:auto_awq"}, awq(), "int4_g32"),
    "fp8 in blocks": Packing(
        {**FP8, "weight_block_size": [128, 128]}, fp8((128, 128), name="weight_scale_inv"), "fp8_b128", True
    ),
    "fp8 in blocks, exponents": Packing(
        {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        fp8((128, 128), name="weight_scale_inv", bytes_=True),
        "fp8_b128",
        True,
    ),
    "fp8 in small blocks": Packing(
        {**FP8, "weight_block_size": [24, 40]}, fp8((24, 40), name="weight_scale_inv"), "fp8_b40"
    ),
    "fp8 static": Packing(
        {**FP8, "activation_scheme": "static"}, fp8(None, more=("input_scale",)), "fp8", True
    ),
    "fp8 of mistral": Packing(None, fp8(None, name="qscale_weight", more=("qscale_act",)), "fp8", True),
    "fbgemm": Packing(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((1, 0)), "fp8", True
    ),
    "modelopt fp8": Packing(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8(None, more=("input_scale", "k_scale")),
        "fp8",
        True,
    ),
    "modelopt nvfp4": Packing(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        nvfp4(modelopt=True),
        "nvfp4",
    ),
    **{
        f"compressed int{b}": Packing(ints(b), packed_integers(b), f"int{b}_g32", outsider=True)
        for b in (2, 3, 4, 5, 6, 7, 8)
    },
    "compressed int4, zeros": Packing(ints(4, 32, False), packed_integers(4, zeros=True), "int4_g32", True),
    "compressed int3, zeros": Packing(ints(3, 32, False), packed_integers(3, zeros=True), "int3_g32", True),
    "compressed int4 by row": Packing(ints(4, 0), packed_integers(4, 0), "int4", True),
    "compressed int4 by importance": Packing(
        ints(4, actorder="group"), packed_integers(4, ordered=True), "int4_g32", True
    ),
    "compressed int8, plain": Packing(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8(), "int8", True
    ),
    "compressed int8, plain, zeros": Packing(
        compressed(
            "naive-quantized", num_bits=8, type="int", strategy="group", group_size=32, symmetric=False
        ),
        int8(32, zeros=True),
        "int8_g32",
        True,
    ),
    "compressed int8 for all": Packing(
        compressed("int-quantized", num_bits=8, type="int", strategy="tensor"), int8(None), "int8", True
    ),
    "compressed fp8 for all": Packing(
        compressed("float-quantized", **FLOAT8, strategy="tensor"),
        fp8(None, more=("input_scale",)),
        "fp8",
        True,
    ),
    "compressed fp8 by row": Packing(
        compressed("naive-quantized", **FLOAT8, strategy="channel"), fp8((1, 0)), "fp8", True
    ),
    "compressed fp8 in blocks": Packing(
        compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[128, 128]),
        fp8((128, 128)),
        "fp8_b128",
        True,
    ),
    "compressed fp8 in groups": Packing(
        compressed("naive-quantized", **FLOAT8, strategy="group", group_size=64), fp8((1, 64)), "fp8_b64"
    ),
    "compressed mxfp8": Packing(
        compressed("mxfp8-quantized", **FLOAT8, strategy="group", group_size=32),
        fp8((1, 32), bytes_=True),
        "fp8_b32",
        True,
    ),
    "compressed nvfp4": Packing(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4(modelopt=False),
        "nvfp4",
        True,
    ),
    "compressed mxfp4": Packing(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4,
        "mxfp4",
        True,
    ),
    "fp8, experts in mxfp4": Packing(
        {**FP8, "weight_block_size": [128, 128], "store_dtype": "mxfp4", "mxfp4_block_size": 32},
        mxfp4_of_mimo,
        "mxfp4",
    ),
    "nf4": Packing(BNB4, bnb_four("nf4"), "bnb_nf4", True),
    "nf4, nested": Packing(
        {**BNB4, "bnb_4bit_use_double_quant": True}, bnb_four("nf4", nested=True), "bnb_nf4", True
    ),
    "bnb fp4": Packing(BNB4, bnb_four("fp4"), "bnb_fp4", True),
    "bnb int8": Packing({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_eight, "int8", True),
}


class InMemory(dict[str, Tensor]):
    """Tensors as files that were read."""

    def names(self) -> list[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def format_of(self, name: str) -> str:
        return str(self[name].dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return self[name].numel() * self[name].element_size()

    def read(self, name: str) -> Tensor:
        return self[name]

    def release(self) -> None:
        pass

    def close(self) -> None:
        self.clear()


def packed_like(tensors: Mapping[str, Tensor], packing: Packing, seed: int = 0) -> tuple[InMemory, Tensors]:
    """A model with linear layers stored in one packing, of random bits, and the same model in float32."""
    torch.manual_seed(seed)
    files, plain = InMemory(), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith("_proj.weight"):
            parts, numbers = packing.make(*tensor.shape)
            module = name.removesuffix("weight")
            files.update({module + part: value for part, value in parts.items()})
            plain[name] = torch.from_numpy(np.asarray(numbers, dtype=np.float32))
        else:
            files[name] = plain[name] = tensor
    return files, plain
