"""Linear layers over planes and plain numbers: bits of rows, shares, assembly, scratch, captured steps."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.errors import ShapeMismatch
from plait.kernels.load import load_for_gpu
from plait.kernels.triton.linear.decode_planes import base_of, make_assembly, make_scaled_assembly
from plait.memory import block_groups
from plait.ops.activation import activate
from plait.ops.blocks import random_weight
from plait.ops.chip import EXAMPLES
from plait.ops.glu import glu
from plait.ops.linear import Linear, linear
from plait.ops.registry import OpFacts
from plait.quant.plane_parts import _INTEGERS, _SIMPLE
from plait.quant.planes import IQ4_ORDER, LANES, PlaneLayout, decode_codes, fill_plane
from plait.quant.weight import Dense, Weight
from plait.runner.device.capture import StepCapture, capture_step, decode_batch
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.parity import Memory, decoder, resolved

load_for_gpu()

TRITON: Any = importlib.import_module("plait.kernels.triton.linear.linear")
ONE_FORM: Any = importlib.import_module("plait.kernels.triton.linear.one_form")
LAYOUTS = {layout for layout, _ in _SIMPLE.values()} | {
    PlaneLayout(low, high, "byte" if low == 8 else "integer", 0 if low == 8 else 1 << (bits - 1))
    for bits, (low, high) in _INTEGERS.items()
} | {PlaneLayout(8, 0, "e4m3"), PlaneLayout(4, 0, "e2m1")}  # fmt: skip
ASSEMBLED = sorted(
    {(one.bits, one.high, one.value, one.zero): one for one in LAYOUTS if one.value != "table"}.items()
)


def bind(fn: Any, **sizes: Any) -> Any:
    """What a GPU would bind, over tensors of the CPU."""
    return fn.bind(OpFacts("cuda", torch.float32, sizes))[0]


def launches(capture: StepCapture) -> list[str]:
    """Without those that poison fresh memory: see `conftest.py`."""
    return [name for name in capture.launches if name != "fill_"]


def dtype_for(kind: str) -> torch.dtype:
    """What x is in where few and many rows have kernels of their own, in planes and in plain numbers."""
    return torch.float32 if kind == "dense" else torch.float16


def near(found: Tensor, wanted: Tensor) -> None:
    bound = linear.tolerance[found.dtype]
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "dense"])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(kind: str) -> None:
    """Of up to 8 rows, and of 17 and more; the interpreter's products of other widths have other orders."""
    weight: Weight = Dense(torch.randn(70, 512)) if kind == "dense" else random_weight(kind, 70, 512)
    dtype = dtype_for(kind)
    packed, x = TRITON.pack(weight, dtype), torch.randn(8, 512, dtype=dtype)
    whole = TRITON.multiply(x, packed, None)
    assert torch.equal(TRITON.multiply(x[5:6], packed, None)[0], whole[5])
    assert torch.equal(TRITON.multiply(x[2:7], packed, None), whole[2:7])
    if kind == "Q4_0":
        many = torch.cat([x, torch.randn(60, 512, dtype=dtype)])
        wanted = TRITON.multiply(many, packed, None)
        assert torch.equal(TRITON.multiply(many[:19], packed, None), wanted[:19])


@pytest.mark.parametrize("kind", ["Q4_0", "dense"])
def test_rows_of_which_the_numbers_lie_apart(kind: str) -> None:
    weight: Weight = Dense(torch.randn(70, 64)) if kind == "dense" else random_weight(kind, 70, 64)
    dtype = dtype_for(kind)
    packed, x = TRITON.pack(weight, dtype), torch.randn(64, 3, dtype=dtype).T
    for run in (TRITON.multiply, ONE_FORM.multiply_any):
        assert torch.equal(run(x, packed, None), run(x.contiguous(), packed, None))


def test_one_program_for_all_shares_gives_the_bits_of_a_program_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, x = TRITON.pack(random_weight("Q4_0", 50, 2048), torch.float16), torch.randn(20, 2048).half()
    assert packed.tiling.many_constants(20)["SHARES"] > 1
    split = TRITON.multiply(x, packed, None)
    monkeypatch.setattr(TRITON.many_rows, "SPLIT", 0)
    assert torch.equal(TRITON.multiply(x, packed, None), split)


@pytest.mark.parametrize("rows", [1, 20])
def test_shares_leave_their_counters_at_zero(rows: int) -> None:
    weight, x = random_weight("Q8_0", 40, 1024), torch.randn(rows, 1024).half()
    packed, bias = TRITON.pack(weight, torch.float16), torch.randn(40).half()
    assert packed.tiling.few_constants(1, "")["SHARES"] > 1
    for _ in range(2):
        near(TRITON.multiply(x, packed, bias), linear.reference(x, weight, bias))
        assert not packed.counters.any()


@pytest.mark.parametrize(("n_out", "steps"), [(32, 16), (4096, 16), (100, 7), (131072, 56), (64, 3)])
def test_shares_of_the_inputs_fill_a_device_and_have_some_steps_each(n_out: int, steps: int) -> None:
    few = TRITON.few_rows
    shares = few.shares_of(n_out, steps, few.BN)
    assert shares in (1, 2, 4, 8)
    assert shares == 1 or (2 * shares <= steps and shares * -(-n_out // few.BN) <= few.PROGRAMS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind", ["Q4_K", "Q4_1", "int4_g64+zeros+order", "fp8_b128", "bnb_nf4", "Q3_K", "nvfp4"]
)
def test_scratch_memory_holds_the_bits_of_the_storage(kind: str) -> None:
    weight = random_weight(kind, 70, 512)
    packed = TRITON.pack(weight, torch.float32)
    numbers, order = TRITON.write_scratch(packed.planes, torch.float32), packed.planes.order
    wanted = weight.dequantize(torch.float32)
    assert torch.equal(numbers, wanted if order is None else wanted[:, order.long()])


def test_many_rows_are_multiplied_by_pieces_of_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON.many_rows, "MOST", 20)
    monkeypatch.setattr(TRITON.many_rows, "SCRATCH", 32 * 256)
    for kind in ("Q4_K", "int4_g64+order"):
        weight, x, bias = random_weight(kind, 80, 256), torch.randn(2, 11, 256).half(), torch.randn(80).half()
        packed = TRITON.pack(weight, torch.float16)
        for added in (None, bias):
            with StepCapture([x, bias, *packed.planes.tensors], is_dry=True) as capture:
                TRITON.multiply(x, packed, added)
            assert capture.launches.count("write_numbers") == 3
            near(TRITON.multiply(x, packed, added), linear.reference(x, weight, added))


def test_a_storage_without_planes_is_decoded_at_each_use() -> None:
    weight, x = random_weight("int4_g8", 24, 64), torch.randn(3, 64)
    packed = TRITON.pack(weight, torch.float32)
    assert packed is weight
    assert torch.equal(TRITON.multiply(x, packed, None), linear.reference(x, weight, None))


def test_parts_of_several_formats_write_into_one_result() -> None:
    weights = [random_weight("Q4_K", 48, 256), random_weight("Q6_K", 24, 256), Dense(torch.randn(8, 256))]
    bias = torch.randn(24).half()
    layer, x = Linear(weights, [None, bias, None], bind, torch.float16), torch.randn(2, 3, 256).half()
    held = [t for packed, *_ in layer.parts[:2] for t in (*packed.planes.tensors, packed.counters)]
    last = layer.parts[2][0]
    with StepCapture([x, bias, *held, last.weight, last.counters], is_dry=True) as capture:
        layer(x)
    assert launches(capture) == ["few_planes", "few_planes", "few_dense"]
    wanted = [linear.reference(x, w, b) for w, b in zip(weights, (None, bias, None), strict=True)]
    near(layer(x), torch.cat(wanted, -1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "swiglu_oai"]
)
@pytest.mark.parametrize("stored", ["dense", "Q8_0"])
def test_gate_and_up_of_few_rows_are_one_launch(kind: str, stored: str) -> None:
    weight: Weight = Dense(torch.randn(80, 512) / 16) if stored == "dense" else random_weight(stored, 80, 512)
    dtype = dtype_for(stored)
    x, bias = torch.randn(3, 512, dtype=dtype), torch.randn(80, dtype=dtype)
    up, fused = Linear([weight], [bias], bind, dtype), bind(glu, kind=kind)
    packed = up.parts[0][0]
    held = [packed.weight] if stored == "dense" else packed.planes.tensors
    with StepCapture([x, bias, packed.counters, *held], is_dry=True) as capture:
        fused(x, up, kind, activate)
    assert len(launches(capture)) == 1
    wanted = activate(linear.reference(x, weight, bias), kind, True)
    bound = 1e-4 if dtype == torch.float32 else linear.tolerance[dtype]
    torch.testing.assert_close(fused(x, up, kind, activate), wanted, atol=bound, rtol=bound)


def test_many_rows_of_gate_and_up_are_activated_apart() -> None:
    weight, x = random_weight("Q8_0", 64, 64), torch.randn(18, 64).half()
    up = Linear([weight], [None], bind, torch.float16)
    found = bind(glu, kind="silu")(x, up, "silu", activate)
    near(found, activate(linear.reference(x, weight, None), "silu", True))


def test_rounded_activations_and_odd_rows_are_refused() -> None:
    def refusal(**sizes: Any) -> str | None:
        reason: str | None = TRITON.why_not(OpFacts("cuda", torch.bfloat16, sizes))
        return reason

    assert refusal(kind="Q4_K", n_in=512) is None
    assert refusal(kind="bfloat16", n_in=512, activations="float32") is None
    assert "round" in str(refusal(kind="Q4_K", n_in=512, activations="int8"))
    assert "16 bytes" in str(refusal(kind="bfloat16", n_in=2051))
    packed = TRITON.pack(random_weight("Q8_0", 8, 64), torch.float32)
    with pytest.raises(ShapeMismatch, match="int8"):
        TRITON.multiply(torch.randn(1, 64), packed, None, "int8")


class Lanes:
    """The instructions of the assembly, over registers of two 16-bit lanes in Python's integers."""

    def __init__(self, dtype: torch.dtype, inputs: list[int], outputs: int) -> None:
        self.dtype = dtype
        self.registers = {f"${outputs + i}": word for i, word in enumerate(inputs)}

    def run(self, code: str) -> None:
        for line in code.strip("{}\n").splitlines():
            name, rest = line.rstrip(";").split(maxsplit=1)
            if name != ".reg":
                target, *sources = (word.strip() for word in rest.split(","))
                self.registers[target] = self.step(name, [self.value(s) for s in sources]) & 0xFFFFFFFF

    def value(self, word: str) -> int:
        if word == "%lanemask_lt":
            return 0x7FFFFFFF  # of the last lane
        return self.registers[word] if re.fullmatch(r"\$\d+|[a-z]", word) else int(word, 0)

    def step(self, name: str, given: list[int]) -> int:
        simple: dict[str, Callable[[], int]] = {
            "mov.b32": lambda: given[0],
            "mov.u32": lambda: given[0],
            "xor.b32": lambda: given[0] ^ given[1],
            "prmt.b32": lambda: self.permute(*given),
            "shr.u32": lambda: given[0] >> given[1],
            "shl.b32": lambda: given[0] << given[1],
            "and.b32": lambda: given[0] & given[1],
            "lop3.b32": lambda: (
                given[0] & given[1] | given[2] if given[3] == 0xEA else given[0] & given[1] ^ given[2]
            ),
            "fma.rn.bf16x2": lambda: self.fma(*given),
            "fma.rn.f16x2": lambda: self.fma(*given),
        }
        return simple[name]()

    @staticmethod
    def permute(low: int, high: int, selector: int) -> int:
        """Bytes of two registers; with the top bit of a selector eight copies of the byte's sign."""
        every, out = (low | high << 32).to_bytes(8, "little"), 0
        for i in range(4):
            which = selector >> 4 * i & 15
            byte = every[which & 7]
            out |= (0xFF * (byte >> 7) if which > 7 else byte) << 8 * i
        return out

    def numbers(self, register: int) -> list[float]:
        bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16)
        found: list[float] = bits.view(self.dtype).double().tolist()
        return found

    def fma(self, a: int, b: int, c: int) -> int:
        """Rounded once; it would be exact in float64."""
        lanes = [x * y + z for x, y, z in zip(*(self.numbers(r) for r in (a, b, c)), strict=True)]
        low, high = (int(v) & 0xFFFF for v in torch.tensor(lanes).double().to(self.dtype).view(torch.int16))
        return low | high << 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layout", [layout for _, layout in ASSEMBLED], ids=[str(key) for key, _ in ASSEMBLED]
)
def test_the_assembly_decodes_every_code_exactly(layout: PlaneLayout, dtype: torch.dtype) -> None:
    bits = layout.bits + layout.high
    rows = max(8, (1 << bits) // LANES)
    codes = (torch.randperm(rows * layout.unit) % (1 << bits)).to(torch.uint8).view(rows, layout.unit)
    if layout.value == "e4m3":
        codes[(codes & 127) == 127] = 0
    low = torch.empty(layout.unit * layout.bits // 256, rows, LANES, dtype=torch.int16)
    fill_plane(low, codes & ((1 << layout.bits) - 1), layout.bits, has_signs=layout.has_signs)
    planes = list(low)
    if layout.high:
        high = torch.empty(1, rows, LANES, dtype=torch.int16)
        fill_plane(high, codes >> layout.bits, layout.high)
        planes.append(high[0])
    wanted = decode_codes(codes, layout, torch.tensor(IQ4_ORDER).float()).view(rows, -1, LANES).double()
    if layout.value in ("integer", "iq4"):
        wanted = wanted + layout.zero + base_of(layout, dtype)
    code = make_assembly(layout, dtype)
    count = layout.unit // LANES
    for row in range(rows):
        for lane in (0, 6, 14):
            words = [int(p[row, lane]) & 0xFFFF | (int(p[row, lane + 1]) & 0xFFFF) << 16 for p in planes]
            machine = Lanes(dtype, words, count)
            machine.run(code)
            found = [machine.numbers(machine.registers[f"${at}"]) for at in range(count)]
            assert found == wanted[row, :, lane : lane + 2].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_multiplies_e2m1_by_every_level_exactly(dtype: torch.dtype) -> None:
    """Levels of E5M3 that E4M3 becomes, from 2^-9 to 448, and 2^-7 as a factor."""
    plane = torch.empty(1, 1, LANES, dtype=torch.int16)
    code = make_scaled_assembly(PlaneLayout(4, 0, "e2m1", 0, "e5m3", 16), dtype)
    for level in range(104, 248):
        codes = torch.randperm(64).to(torch.uint8).view(1, 64) % 16
        fill_plane(plane, codes, 4, has_signs=True)
        wanted = decode_codes(codes, PlaneLayout(4, 0, "e2m1"), None).view(-1, LANES).double()
        wanted *= 2.0 ** ((level >> 3) - 29) * (1 + level % 8 / 8)
        lanes = level * 0x100010 + 0x70007000 if dtype is torch.bfloat16 else level * 0x800080
        word = int(plane[0, 0, 0]) & 0xFFFF | (int(plane[0, 0, 1]) & 0xFFFF) << 16
        machine = Lanes(dtype, [word, *[lanes] * 8], 4)
        machine.run(code)
        assert [machine.numbers(machine.registers[f"${at}"]) for at in range(4)] == wanted[:, :2].tolist()


FAST = ("Q8_0", "int4_g32+zeros", "fp8")
LAYERS = ("few_planes", "few_dense")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind",
    [
        *FAST,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "dense",
                "Q4_0",
                "Q4_1",
                "Q5_0",
                "Q5_1",
                "IQ4_NL",
                "MXFP4",
                "NVFP4",
                "mxfp4",
                "int8",
                "bnb_nf4",
            )
        ),
    ],
)
def test_a_decode_of_a_llama_has_one_launch_for_each_linear_layer(kind: str, tmp_path: Path) -> None:
    tiny.write("llama", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    whole = {name for name, t in tensors.items() if kind != "dense" and t.dim() == 2 and t.shape[1] % 64 == 0}
    stored: dict[str, Any] = {
        n: random_weight(kind, *t.shape) if n in whole else t for n, t in tensors.items()
    }
    checkpoint = Memory(stored)
    dtype = dtype_for(kind)
    model = decoder(resolved(checkpoint, config), checkpoint, chip=EXAMPLES[90], dtype=dtype)
    groups = block_groups(model.states)
    store = StateStore(model.states, {g.name: 8 for g in groups}, 4, 16, torch.device("cpu"), dtype)
    for tensor in store.tensors:
        tensor.zero_()
    capture, _ = capture_step(model, store, decode_batch(groups, 2, 4, store), is_dry=True)
    layers = config["num_hidden_layers"]
    assert (
        sum(capture.launches.count(name) for name in LAYERS) == 4 * layers + 1
    )  # qkv, o, gate and up, down; head
    assert bool(capture.launches.count("few_planes")) == bool(whole)
