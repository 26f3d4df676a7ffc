"""Quantized checkpoints that were damaged or made up: an error of ours that names a tensor, or numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.errors import CheckpointError
from plait.quant.weight import as_tensor
from tests.checkpoint.quantized.packings import PACKINGS, InMemory

X = "model.layers.0.mlp.up_proj"
DTYPES = (
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.float32,
    torch.int64,
)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def filled(tensor: Tensor, byte: int) -> Tensor:
    return torch.full_like(bytes_of(tensor), byte).view(tensor.dtype).view(tensor.shape)


def noise(tensor: Tensor, seed: int) -> Tensor:
    raw = bytes_of(tensor).clone()
    if len(raw):
        raw[torch.randint(0, len(raw), (5,), generator=torch.Generator().manual_seed(seed))] += seed % 255 + 1
    return raw.view(tensor.dtype).view(tensor.shape)


def changed(tensor: Tensor, how: str, n: int) -> Tensor:
    match how:
        case "cut" if tensor.ndim:
            return tensor.narrow(n % tensor.ndim, 0, tensor.shape[n % tensor.ndim] // 2)
        case "twice" if tensor.ndim:
            return torch.cat([tensor.view(tensor.dtype), tensor], n % tensor.ndim)
        case "turned" if tensor.ndim > 1:
            return tensor.transpose(0, 1)
        case "flat":
            return tensor.reshape(-1)
        case "deep":
            return tensor[None]
        case "filled":
            return filled(tensor, n % 256)
        case "noise":
            return noise(tensor, n)
        case "dtype":
            return tensor.float().to(DTYPES[n % len(DTYPES)])
        case "bytes":
            return bytes_of(tensor)
    return tensor[:0] if tensor.ndim else tensor


HOWS = st.sampled_from(
    ["cut", "twice", "turned", "flat", "deep", "filled", "noise", "dtype", "bytes", "empty"]
)
CHANGE = st.tuples(st.integers(0, 9), HOWS | st.just("gone"), st.integers(0, 400))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(PACKINGS)),
    changes=st.lists(CHANGE, min_size=1, max_size=3),
    with_config=st.booleans(),
)
def test_damaged_parts_are_refused_or_are_numbers(name: str, changes: Any, with_config: bool) -> None:
    torch.manual_seed(0)
    packing = PACKINGS[name]
    files = InMemory({f"{X}.{part}": tensor for part, tensor in packing.make(32, 64)[0].items()})
    for which, how, n in changes:
        part = sorted(files)[which % len(files)]
        if how != "gone":
            files[part] = changed(files[part], how, n)
        elif len(files) > 1:
            del files[part]
    config = {"quantization_config": packing.config} if with_config and packing.config else None
    try:
        checkpoint = QuantizedCheckpoint(files, find_scheme(config))
        for found in checkpoint.names():
            value = checkpoint.read(found)
            assert value.shape is not None
            assert as_tensor(value).numel() <= 64 * sum(tensor.nbytes for tensor in files.values()) + 64
    except CheckpointError as error:
        assert X in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("block", [[1, 10**9], [10**9, 1], [2**70, 2**70], [1, 1], [7, 13]])
def test_absurd_blocks_are_refused_or_are_the_whole(block: list[int]) -> None:
    torch.manual_seed(0)
    name, scale = "model.layers.0.mlp.experts.up_proj", torch.ones(3, 1, 1)
    files = InMemory({name: torch.zeros(3, 40, 64).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale})
    scheme = find_scheme({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})
    assert as_tensor(QuantizedCheckpoint(files, scheme).read(name)).shape == (120, 64)
    files[f"{name}_scale_inv"] = torch.ones(3, 40, 1)
    if block == [1, 10**9]:
        assert as_tensor(QuantizedCheckpoint(files, scheme).read(name)).shape == (120, 64)
    else:
        with pytest.raises(CheckpointError, match="do not fit"):
            QuantizedCheckpoint(files, scheme)
