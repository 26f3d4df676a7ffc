"""What a loaded quantized model holds on a GPU, with kernels for packed weights or none: what the file holds.

The variants that CUDA would get are bound here over tensors of the CPU, and all that the model holds is
checked. No numbers of the size of a weight matrix may be in memory that is not the checkpoint's own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.checkpoint.weights import Weights
from plait.kernels.cpu.codegen.kernel import Kernel, NativeEntry
from plait.kernels.load import load_for_gpu
from plait.model.decoder import Decoder
from plait.ops.blocks import random_weight
from plait.ops.linear import linear
from plait.ops.registry import Op, OpFacts
from plait.quant.weight import Dense, Weight
from tests.checkpoint.quantized.packings import PACKINGS, packed_like
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved, whole, worst
from tests.families.test_packed import CONFIGS, IDS, Model

LEAST = 64 * 64  # numbers in the smallest weight matrix of these models
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = [name for name, packing in PACKINGS.items() if packing.config]
# On Triton's interpreter: codes with zero points, floats in blocks, places in a table, scales of two levels.
QUICK = ("gptq4", "fp8 in blocks", "nf4", "compressed nvfp4")
MODELS = {"nf4": "qwen3_moe", "fp8 in blocks": "deepseek_v3", "compressed fp8 by row": "deepseek_v3"}
Rows = list[tuple[str, str | None]]


def bind_as_on_cuda(patch: pytest.MonkeyPatch, kernels: bool) -> Rows:
    """From now on. Returns which variant each op gets, and for what kind of weight.

    `kernels`: linear layers and tables get those of GPUs. All else is a reference: Triton's interpreter
    takes seconds for a pass, and other tests compare its kernels.
    """
    rows: Rows = []
    if kernels:
        pytest.importorskip("triton", reason="Triton is not installed here")
        load_for_gpu()

    def bind(self: Weights, op: Op, **sizes: Any) -> Any:
        choice = "auto" if kernels and op.name in ("linear", "embed") else "reference"
        fn, row = op.bind(OpFacts("cuda", self.target.dtype, sizes), self.prefix, choice)
        rows.append((f"{op.name} {row.variant}", sizes.get("kind")))
        return fn

    patch.setattr(Weights, "bind", bind)
    return rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for name, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
        tiny.randomize(model, one_plus=False)
        folder = tmp_path_factory.mktemp(name)
        tiny.save(model, folder)
        found[name] = tiny.read(folder)[:2]
    return found


def held(thing: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from a model: through attributes, slots, closures and partials."""
    seen, waiting = set[int](), [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or type(one) in PROXIES:
            continue
        if isinstance(one, type | Op | Kernel | NativeEntry) or type(one).__name__ == "module":
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif not callable(one) or hasattr(one, "__self__") or not hasattr(one, "__globals__"):
            waiting += gc.get_referents(one)
        else:
            waiting += [one.__closure__, one.__defaults__]


def own_copies(model: Decoder, tensors: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """Shapes of plain tensors, as large as a weight matrix, that are not in the checkpoint's own memory."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    large = (t for t in held(model) if t.dtype in FLOATS and t.numel() >= LEAST)
    return [tuple(t.shape) for t in large if t.untyped_storage().data_ptr() not in own]


@pytest.mark.parametrize("name", NAMES)
def test_no_numbers_of_a_quantized_model_are_kept(
    name: str, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bind_as_on_cuda(monkeypatch, kernels=False)
    keeps_none(name, models)
    assert ("linear reference", PACKINGS[name].format) in rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_nor_by_the_kernels_of_a_gpu(
    name: str, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bind_as_on_cuda(monkeypatch, kernels=True)
    keeps_none(name, models)
    assert ("linear triton", PACKINGS[name].format) in rows


def keeps_none(name: str, models: dict[str, Model]) -> None:
    """The model holds nothing but what the files do, before and after a pass, which is right."""
    config, tensors = models[MODELS.get(name, "qwen3_moe" if "fp8" in name else "llama")]
    said = PACKINGS[name].config
    files, plain = packed_like(tensors, PACKINGS[name])
    checkpoint = QuantizedCheckpoint(files, find_scheme({"quantization_config": said}))
    found = decoder(resolved(checkpoint, {**config, "quantization_config": said}), checkpoint)
    assert own_copies(found, files) == []
    logits = whole(decoder(resolved(Memory(plain), config), Memory(plain)), IDS)
    assert worst(whole(found, IDS), logits) <= 1e-4 * float(logits.abs().max())
    assert own_copies(found, files) == []


@pytest.mark.parametrize("kernels", [False, True])
def test_blocks_of_gguf_stay_blocks_at_both_ends_of_a_model_too(
    kernels: bool, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers, embedding table and head: of random blocks, several formats in one fused matrix."""
    rows = bind_as_on_cuda(monkeypatch, kernels)
    config, tensors = models["qwen3_moe"]
    kinds = {"embed_tokens": "Q4_0", "lm_head": "Q8_0", "k_proj": "Q5_1", "up_proj": "IQ4_NL"}
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        kind = next((kind for word, kind in kinds.items() if word in name), "Q4_1")
        keeps = tensor.dim() != 2 or tensor.shape[1] % 32 or name.endswith("mlp.gate.weight")
        stored[name] = tensor if keeps else random_weight(kind, *tensor.shape)
    plain = {n: t if isinstance(t, Tensor) else t.dequantize(torch.float32) for n, t in stored.items()}
    found = decoder(resolved(Memory(stored), config), Memory(stored))
    assert own_copies(found, {n: t for n, t in stored.items() if isinstance(t, Tensor)}) == []
    reads = ("triton", "planes") if kernels else ("reference",)
    assert set(kinds.values()) <= {kind for variant, kind in rows if variant.endswith(reads)}
    logits = whole(decoder(resolved(Memory(plain), config), Memory(plain)), IDS)
    assert worst(whole(found, IDS), logits) <= 1e-4 * float(logits.abs().max())


def test_a_copy_that_is_kept_would_be_found() -> None:
    weight = random_weight("Q8_0", 64, 64)

    class Keeps:
        def __init__(self, weight: Weight) -> None:
            numbers = weight.dequantize(torch.float32)
            self.apply = lambda x: linear(x, Dense(numbers), None)

    assert own_copies(Keeps(weight), {}) == [(64, 64)]
