"""The token scans in Triton: a row depends on its history only, however prompts are cut and batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from plait.errors import CannotRecord
from plait.families.resolve import resolve
from plait.kernels.load import load_for_gpu
from plait.kernels.triton.maths import one_minus_exp, sigmoid, silu, softplus, turn_by
from plait.kernels.triton.ssm import mamba3
from plait.memory import block_groups
from plait.ops.chip import EXAMPLES
from plait.ops.launch import watch_launches
from plait.ops.mamba3 import mamba3_scan, raw_mamba3_scan
from plait.ops.mlstm import mlstm_scan
from plait.ops.registry import Op, OpFacts
from plait.ops.rg_lru import rg_lru
from plait.ops.ssm import gated_mamba1_scan, mamba1_scan
from plait.ops.wkv import wkv4_scan, wkv6_scan, wkv7_scan
from plait.runner.device.capture import StepCapture, capture_step, decode_batch
from plait.state.store import StateStore
from tests.families.oxidizr.oxidizr_checkpoint import golden
from tests.families.parity import Memory, decoder, in_pieces, worst
from tests.kernels.wkv6_decays import DIM, HEADS, SLOW, given, largest_error
from tests.runner.recordings import OXIDIZR

load_for_gpu()
SCANS = [
    mamba1_scan,
    gated_mamba1_scan,
    mamba3_scan,
    raw_mamba3_scan,
    rg_lru,
    wkv6_scan,
    wkv7_scan,
    wkv4_scan,
    mlstm_scan,
]
STATES = ("state", "angle", "prev_b", "prev_x", "sums", "weights", "memory", "norms", "largest")
SLOTS, TOKENS = 11, 13  # numbers that no other size has: they say which arguments are which


def operands(op: Op) -> list[Any]:
    """Arguments of one sequence of TOKENS tokens without history, over SLOTS slots."""
    assert op.make
    case = dict(seqs=[(TOKENS, False)], decodes=0, heads=2, dim=5, state=6, groups=2, normed=True)
    case |= dict(size=5, key_dim=6)
    return list(op.make(case, torch.float32, "cpu")[0])


def run(op: Op, args: Sequence[Any], parts: Sequence[tuple[int, int, int]], states: list[Tensor]) -> Tensor:
    """One launch over parts (first row, tokens, slot) of the rows of `args`; states: [SLOTS, ...] each."""
    at = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype is torch.bool)
    rows = [row for first, count, _ in parts for row in range(first, first + count)]
    starts = torch.tensor([0, *(count for _, count, _ in parts)]).cumsum(0)
    where = [torch.tensor([slot for *_, slot in parts]), starts, torch.tensor([f > 0 for f, *_ in parts])]
    own = iter(states)
    taken = []
    for i, a in enumerate(args):
        if i in (at - 2, at - 1, at):
            taken.append(where[i - at + 2])
        elif isinstance(a, Tensor) and a.shape[0] == TOKENS:
            taken.append(a[rows])
        elif isinstance(a, Tensor) and i < at and is_state(op, i):
            taken.append(next(own))
        else:
            taken.append(a)
    taken[at + 1] = sum(count == 1 and first > 0 for first, count, _ in parts)
    fn, binding = op.bind(OpFacts("cuda", torch.float32, {"dim": 5, "state": 6}, chip=EXAMPLES[90]))
    assert binding.variant == "triton"
    found = fn(*taken)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def is_state(op: Op, i: int) -> bool:
    names = list(op.reference.__code__.co_varnames)
    return names[i] in STATES


def memory(op: Op, args: Sequence[Any]) -> list[Tensor]:
    """Slots full of garbage."""
    found = [a for i, a in enumerate(args) if isinstance(a, Tensor) and is_state(op, i)]
    return [torch.full((SLOTS, *a.shape[1:]), torch.nan) for a in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", SCANS, ids=lambda op: op.name)
def test_a_prompt_that_is_cut_anywhere_gives_the_same_bits(op: Op) -> None:
    args = operands(op)
    whole, cut = memory(op, args), memory(op, args)
    want = run(op, args, [(0, TOKENS, 3)], whole)
    parts = [run(op, args, [(first, count, 7)], cut) for first, count in ((0, 1), (1, 5), (6, 1), (7, 6))]
    assert torch.equal(torch.cat(parts), want)
    assert want.isfinite().all()
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a[3], b[7])
        assert a[[0, 2, 4, 7]].isnan().all(), "slots of other sequences are not touched"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", SCANS, ids=lambda op: op.name)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(op: Op) -> None:
    args = operands(op)
    states = memory(op, args)
    run(op, args, [(0, 4, 2), (0, 8, 5), (0, 1, 9)], states)
    alone, mixed, decodes = ([a.clone() for a in states] for _ in range(3))
    want = run(op, args, [(4, 1, 2)], alone)
    got = run(op, args, [(8, 1, 5), (4, 1, 2), (1, 3, 9), (0, 2, 1)], mixed)
    assert torch.equal(got[1:2], want)
    assert torch.equal(run(op, args, [(8, 1, 5), (1, 1, 9), (4, 1, 2)], decodes)[2:], want)
    for a, b, c in zip(alone, mixed, decodes, strict=True):
        assert torch.equal(a[2], b[2])
        assert torch.equal(a[2], c[2])


class Watcher:
    """Keeps the memory that launches get."""

    def __init__(self) -> None:
        self.storages: list[int] = []

    def record_launch(self, name: str, run: Any, tensors: Sequence[Tensor], rest: tuple[object, ...]) -> None:
        self.storages += [t.untyped_storage().data_ptr() for t in tensors]
        run()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", SCANS, ids=lambda op: op.name)
def test_rows_that_lie_apart_are_read_where_they_lie(op: Op) -> None:
    args = operands(op)
    want = run(op, args, [(0, TOKENS, 3)], memory(op, args))
    apart, views = list(args), []
    for i, a in enumerate(args):
        if isinstance(a, Tensor) and a.shape[0] == TOKENS:
            wide = torch.full((TOKENS, a[0].numel() + 3), torch.nan)
            wide[:, 2:-1] = a.flatten(1)
            apart[i] = wide[:, 2:-1].unflatten(-1, a.shape[1:])
            views.append(wide.untyped_storage().data_ptr())
    watcher, states, indexed = Watcher(), memory(op, args), Tensor.__getitem__
    with watch_launches(watcher), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__getitem__", lambda t, i: t if i == list(range(TOKENS)) else indexed(t, i))
        got = run(op, apart, [(0, TOKENS, 3)], states)
    assert torch.equal(got, want)
    assert views
    assert set(views) <= set(watcher.storages)


def test_a_wide_head_of_mamba3_is_taken_some_rows_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    args = operands(raw_mamba3_scan)
    whole, parts = memory(raw_mamba3_scan, args), memory(raw_mamba3_scan, args)
    want = run(raw_mamba3_scan, args, [(0, TOKENS, 3)], whole)
    monkeypatch.setattr(mamba3, "TILE", 16)  # two of five rows
    assert torch.equal(run(raw_mamba3_scan, args, [(0, TOKENS, 3)], parts), want)
    assert all(torch.equal(a[3], b[3]) for a, b in zip(whole, parts, strict=True))


@triton.jit
def _functions(x, out, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = tl.load(x + i)
    tl.store(out + i, sigmoid(at))
    tl.store(out + n + i, silu(at))
    tl.store(out + 2 * n + i, softplus(at))
    tl.store(out + 3 * n + i, one_minus_exp(-tl.abs(at)))
    angle, cos, sin = turn_by(at * 0 + 3.0, at)
    tl.store(out + 4 * n + i, angle)
    tl.store(out + 5 * n + i, cos)
    tl.store(out + 6 * n + i, sin)


def test_functions_are_as_precise_as_torchs() -> None:
    x = torch.cat([torch.linspace(-30, 30, 448), torch.logspace(-8, -1, 64)])
    out = torch.empty(7, len(x))
    _functions[(1,)](x, out, len(x), SIZE=512)
    wide = x.double()
    turned = (wide + 3.0).remainder(2 * torch.pi)
    want = [wide.sigmoid(), torch.nn.functional.silu(wide), torch.log1p(wide.exp()), -(-wide.abs()).expm1()]
    for got, exact in zip(out, want, strict=False):
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(out[4].double(), turned, rtol=0, atol=3e-7)
    for got, exact in zip(out[5:], (out[4].double().cos(), out[4].double().sin()), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=1.5e-7)


@pytest.mark.parametrize("has_bonus", [True, False])
@pytest.mark.parametrize("decay", [SLOW, torch.inf])
def test_rwkv6s_decays_give_what_double_precision_gives(decay: float, has_bonus: bool) -> None:
    sizes = {"heads": HEADS, "dim": DIM, "key_dim": DIM}
    fn, binding = wkv6_scan.bind(OpFacts("cuda", torch.float32, sizes, chip=EXAMPLES[90]))
    assert binding.variant == "triton"
    assert largest_error(fn, given(decay, has_bonus=has_bonus)) <= 1e-6


def on_gpu(name: str, is_gpu: bool = True) -> tuple[Any, StateStore]:
    """An oxidizr model with what a GPU binds, its tensors being on the CPU; or with the references."""
    model = OXIDIZR[name]
    checkpoint = Memory({k: t.float().contiguous() for k, t in golden(model.shapes).items()})
    shapes = {key: tuple(tensor.shape) for key, tensor in checkpoint.items()}
    mode = model.options.get("ssm_mode", "ssd")
    found = resolve(model.config, shapes, read=checkpoint.read, ssm_mode=mode)
    made = decoder(found, checkpoint, chip=EXAMPLES[90] if is_gpu else None)
    blocks = {group.name: 8 for group in block_groups(made.states)}
    store = StateStore(made.states, blocks, 4, 16, torch.device("cpu"), torch.float32)
    for tensor in store.tensors:
        tensor.zero_()
    return made, store


def captured(name: str) -> StepCapture:
    model, store = on_gpu(name)
    batch = decode_batch(block_groups(model.states), 2, 4, store)
    return capture_step(model, store, batch, strict=False, is_dry=True)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [name for name in OXIDIZR if name.startswith("mamba") and "exact" not in name]
)
def test_a_decode_step_of_oxidizrs_mamba_models_can_be_captured(name: str) -> None:
    capture = captured(name)
    assert not capture.faults
    scan = "scan_channels" if name == "mamba1" else "scan_heads"
    assert capture.launches.count(scan) == 2, "one launch for each layer"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba1", "mamba3_mimo_conv"])
def test_a_model_on_kernels_gives_the_references_logits_in_ragged_batches(name: str) -> None:
    ids = [torch.randint(1, 10, (n,)) for n in (23, 17)]
    (kernels, _), (references, _) = on_gpu(name), on_gpu(name, is_gpu=False)
    for got, want in zip(in_pieces(kernels, ids), in_pieces(references, ids), strict=True):
        assert worst(got, want) < 1e-5


@pytest.mark.parametrize("name", ["hybrid_exact", "mamba3_exact"])
def test_the_trainers_scan_is_never_captured(name: str) -> None:
    (model, _), (_, store) = on_gpu(name), on_gpu("mamba3")
    batch = decode_batch((), 2, 4, store)
    with pytest.raises(CannotRecord, match="the model is not causal"):
        capture_step(model, store, batch, strict=False, is_dry=True)
