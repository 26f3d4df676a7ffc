"""Small parts of conversion: orders of rows, packed numbers, slices of bounded size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint.names import Back, Derived, NameMap
from plait.convert.hf.keys import llama3_scaling, strangers
from plait.convert.plan import tensor_plan
from plait.convert.plan.reconcile_specs import differences
from plait.convert.plan.source import NeededTensor
from plait.convert.plan.storage import Fp8Blocks, Int4Groups
from plait.convert.plan.tensor_plan import Made, TensorPart, matrices, pieces, plan_tensors
from plait.errors import UnsupportedFormat
from plait.families.common.row_orders import pairs_order, value_order
from plait.ops.rope import frequencies
from plait.spec.model import NormSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import DeltaNetSpec
from tests.families.as_gguf import permuted


class Tensors:
    """Tensors by our names."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("_", "."): t for name, t in tensors.items()}
        self.wanted = {n: NeededTensor(tuple(t.shape), n, {}) for n, t in self.tensors.items()}
        self.checkpoint = None

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@given(st.integers(1, 5), st.integers(0, 3))
def test_pairs_and_back_are_inverse(half: int, rest: int) -> None:
    there = pairs_order(2 * half + rest, 2 * half, to_pairs=True)
    back = pairs_order(2 * half + rest, 2 * half, to_pairs=False)
    assert torch.equal(there[back], torch.arange(2 * half + rest))
    rows = torch.arange(2 * half)
    assert torch.equal(there[: 2 * half], permuted(rows, 1))


def test_value_heads_in_tiles() -> None:
    mixer = DeltaNetSpec(6, 2, 4, 4, 4, NormSpec())
    tiles = value_order(mixer, 1, to_tiles=True)
    assert tiles.tolist() == [0, 3, 1, 4, 2, 5]  # the first of each key head, the second, the third
    assert torch.equal(tiles[value_order(mixer, 1, to_tiles=False)], torch.arange(6))


def test_rows_that_alternate_are_put_back() -> None:
    even, odd = torch.arange(0, 6, 2), torch.arange(1, 6, 2)
    names = NameMap(
        {"q": Derived(lambda w: w[even], ("both",)), "gate": Derived(lambda w: w[odd], ("both",))}
    )
    whole = torch.randn(6, 3)
    ours = Tensors(q=whole[even], gate=whole[odd])
    (made,) = plan_tensors(ours.wanted, names, "a test")
    found = torch.cat([p for matrix, scale in matrices(ours, made) for p in pieces(matrix, scale)])  # type: ignore[arg-type]
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    "recipe", [lambda w: w * 2, lambda w: w[:2], lambda w: w.T, lambda w: w[torch.tensor([0, 0, 1])]]
)
def test_what_is_more_than_an_order_is_not_assumed(recipe: object) -> None:
    ours = Tensors(q=torch.zeros(3, 3))
    with pytest.raises(UnsupportedFormat, match="the way back to both in a test is not implemented"):
        plan_tensors(ours.wanted, NameMap({"q": Derived(recipe, ("both",))}), "a test")  # type: ignore[arg-type]


def test_a_part_that_is_missing_is_reported() -> None:
    ours = Tensors(gate=torch.zeros(2, 2))
    names = NameMap({"gate": Derived(lambda w: w[:2], ("both",), (Back(at=0, of=2),))})
    with pytest.raises(UnsupportedFormat, match=r"both of a test is made of 2 tensor\(s\), the model has 1"):
        plan_tensors(ours.wanted, names, "a test")


def test_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_plan, "PIECE", 20)
    whole = torch.randn(7, 8)
    ours = Tensors(x=whole)
    made = Made("x", (7, 8), (TensorPart("x", scale=2.0),), ("x",))
    found = [p for matrix, scale in matrices(ours, made) for p in pieces(matrix, scale)]  # type: ignore[arg-type]
    assert [len(piece) for piece in found] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(found), whole * 2)


def written(stored: Fp8Blocks | Int4Groups, ours: Tensors) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    stored.write(ours, found.append)  # type: ignore[arg-type]
    assert sum(t.numel() * t.element_size() for t in found) == sum(e.nbytes for e in stored.entries)
    return found


def test_fp8_blocks_hold_their_numbers() -> None:
    w = torch.randn(200, 300) * torch.logspace(-3, 3, 200)[:, None]
    *codes, scales = written(Fp8Blocks(Made("w", (200, 300), (TensorPart("w"),), ("w",))), Tensors(w=w))
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    found = torch.cat(codes).float() * spread
    limit = w.abs() / 16 + spread / 512  # three bits of fraction; below, steps of 2^-9
    assert bool(((found - w).abs() <= limit * 1.001).all())
    assert scales.shape == (2, 3)


def test_int4_codes_are_eight_to_a_word() -> None:
    w = torch.tensor([[-8.0, 7, 1, 0, -1, 2, 3, 4] * 4]).repeat(3, 1) * torch.tensor([[1.0], [0.5], [4.0]])
    packed, scales, shape = written(
        Int4Groups(Made("w", (3, 32), (TensorPart("w"),), ("w",)), 32, torch.float16), Tensors(w=w)
    )
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(1).float() - 8
    found = codes * scales.float().repeat_interleave(32, 1)
    assert float((found - w).abs().max() / w.abs().max()) < 0.07
    assert shape.tolist() == [3, 32]


def test_llama3_is_found_again_by_its_divisors() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = (frequencies(RopeSpec(64, 5e5, s), 131_072)[0] for s in ({}, scaling))
    divisors = RopeSpec(64, 5e5, {"rope_type": "divisors", "divisors": (plain / scaled).tolist()})
    assert llama3_scaling(divisors, 131_072) == scaling
    other = RopeSpec(64, 5e5, {"rope_type": "divisors", "divisors": [1.0] * 31 + [7.0]})
    assert llama3_scaling(other, 131_072) == other.scaling  # other models' factors stay as they are
    (told,) = strangers({"rope_parameters": dict(other.scaling)})
    assert told.endswith("these divisors of rotary frequencies are not Llama 3's")
    assert strangers({"rope_parameters": {"sliding_attention": dict(scaling)}}) == []


def test_differences_have_their_place() -> None:
    a, b = RopeSpec(8, 1e4), RopeSpec(8, 5e5, interleaved=True)
    assert list(differences(a, a)) == []
    assert list(differences({"x": (a,)}, {"x": (b,)})) == [
        "x.0.theta = 10000.0, there 500000.0",
        "x.0.interleaved = False, there True",
    ]
