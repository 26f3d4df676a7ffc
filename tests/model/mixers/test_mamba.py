"""Mamba1, 2 and 3 mixers against their formulae written out token by token, and in chunks against whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.memory import SlotState
from plait.model.layers.layers import Batch
from plait.model.mixers.mamba1 import Mamba1
from plait.model.mixers.mamba2 import Mamba2
from plait.model.mixers.mamba3 import Mamba3
from plait.spec.recurrent import Mamba1Spec, Mamba2Spec, Mamba3Spec
from plait.state.store import StateStore

HIDDEN, CPU = 12, torch.device("cpu")
MAMBA2 = Mamba2Spec(4, 6, 5, 2, 4, norm_groups=2)
MAMBA3 = Mamba3Spec(4, 6, 4, 2)
MAMBA1 = Mamba1Spec(24, 5, 3, 4)


class Tensors(dict[str, Tensor]):
    """A checkpoint in memory under our own names."""

    def names(self) -> list[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def format_of(self, name: str) -> str:
        return str(self[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Tensor:
        return self[name]


def make(kind: Any, s: Any, tensors: Mapping[str, Tensor]) -> Any:
    names = NameMap({"mix.{x}": "{x}", "mix.{x}.{y}": "{x}.{y}"})
    w = Weights(Tensors(tensors), names, Target(CPU, torch.float32, 64, HIDDEN))
    mixer = kind(s, w.scope("mix"))
    w.check_all_used()
    return mixer


def normal(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def mamba2_tensors(s: Mamba2Spec) -> dict[str, Tensor]:
    inner, both = s.num_heads * s.head_dim, s.num_groups * s.state_size
    tensors = normal(
        {
            "in.weight": (2 * inner + 2 * both + s.num_heads, HIDDEN),
            "in.bias": (2 * inner + 2 * both + s.num_heads,),
            "out.weight": (HIDDEN, inner),
            "conv.weight": (inner + 2 * both, s.conv_kernel),
            "conv.bias": (inner + 2 * both,),
            "D": (s.num_heads,),
            "dt_bias": (s.num_heads,),
            "gated_norm.weight": (inner,),
        }
    )
    if not s.gated_norm:
        del tensors["gated_norm.weight"]
    return {**tensors, "A": -torch.rand(s.num_heads) * 4}


def convolve(x: Tensor, t: Mapping[str, Tensor]) -> Tensor:
    weight = t["conv.weight"]
    channels, kernel = weight.shape
    out = F.conv1d(x.T[None], weight[:, None], t["conv.bias"], padding=kernel - 1, groups=channels)
    return F.silu(out[0, :, : len(x)].T)


def mamba2_formula(s: Mamba2Spec, t: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Dao & Gu 2024 for one whole sequence, one head and one token at a time."""
    inner, both = s.num_heads * s.head_dim, s.num_groups * s.state_size
    p = x @ t["in.weight"].T + t["in.bias"]
    z, xbc, dt = p[:, :inner], p[:, inner : 2 * inner + 2 * both], p[:, -s.num_heads :]
    xbc = convolve(xbc, t)
    dt = torch.log1p(torch.exp(dt + t["dt_bias"])).clamp(*s.dt_limit)
    y = torch.zeros(len(x), inner)
    for h in range(s.num_heads):
        at = h // (s.num_heads // s.num_groups) * s.state_size
        state, own = torch.zeros(s.head_dim, s.state_size), slice(h * s.head_dim, (h + 1) * s.head_dim)
        for n in range(len(x)):
            u = xbc[n, own]
            b = xbc[n, inner + at : inner + at + s.state_size]
            c = xbc[n, inner + both + at : inner + both + at + s.state_size]
            state = torch.exp(t["A"][h] * dt[n, h]) * state + dt[n, h] * torch.outer(u, b)
            y[n, own] = state @ c + t["D"][h] * u
    gate = z * torch.sigmoid(z)
    if not s.gated_norm:
        return (y * gate) @ t["out.weight"].T
    y = y if s.norm_before_gate else y * gate
    parts = y.view(len(x), s.norm_groups, -1)
    y = (parts / (parts.square().mean(-1, keepdim=True) + s.gated_norm.eps).sqrt()).view_as(y)
    y = y * t["gated_norm.weight"]
    return (y * gate if s.norm_before_gate else y) @ t["out.weight"].T


def batch(pieces: list[tuple[int, int]], slots: list[int]) -> Batch:
    """pieces: (start, new tokens) of each sequence, decodes first."""
    starts = torch.tensor([0, *(n for _, n in pieces)]).cumsum(0)
    positions = torch.tensor([p for start, n in pieces for p in range(start, start + n)])
    decodes = sum(n == 1 and start > 0 for start, n in pieces)
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_start=starts,
        seq_lens=torch.tensor([start + n for start, n in pieces]),
        num_decodes=decodes,
        paged={},
        state_slots=torch.tensor(slots),
        has_history=torch.tensor([start > 0 for start, _ in pieces]),
        logit_rows=starts[1:] - 1,
    )


def whole(mixer: Any, x: Tensor) -> Tensor:
    store = StateStore(mixer.states, {}, 3, 4, CPU, torch.float32)
    return mixer(x, batch([(0, len(x))], [2]), store)


def in_pieces(mixer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two sequences of 21 and 11 tokens, cut and mixed; their slots hold garbage at first."""
    store = StateStore(mixer.states, {}, 4, 4, CPU, torch.float32)
    out: tuple[list[Tensor], list[Tensor]] = ([], [])
    steps = [
        ((0, 7), None),
        ((7, 1), (0, 2)),
        ((8, 1), (2, 1)),
        ((9, 5), None),
        ((14, 1), (3, 8)),
        ((15, 6), None),
    ]
    for first, second in steps:
        parts = [(a, first, 3, out[0]), *([(b, second, 1, out[1])] if second else [])]
        x = torch.cat([m[start : start + n] for m, (start, n), _, _ in parts])
        y = mixer(x, batch([p for _, p, _, _ in parts], [slot for _, _, slot, _ in parts]), store)
        for (_, (_, n), _, kept), piece in zip(parts, y.split([p[1] for _, p, _, _ in parts]), strict=True):
            assert len(piece) == n
            kept.append(piece)
    return torch.cat(out[0]), torch.cat(out[1])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_groups": 1},
        {"num_groups": 4, "norm_groups": 4},
        {"dt_limit": (0.05, 0.3)},
        {"norm_before_gate": True},
        {"gated_norm": None},
        {"conv_kernel": 2},
        {"chunk_size": 3},
    ],
)
def test_mamba2_equals_its_formula_whole_and_in_chunks(change: dict[str, Any]) -> None:
    s = replace(MAMBA2, **change)
    tensors = mamba2_tensors(s)
    mixer = make(Mamba2, s, tensors)
    a, b = torch.randn(21, HIDDEN), torch.randn(11, HIDDEN)
    for got, x in zip(in_pieces(mixer, a, b), (a, b), strict=True):
        want = mamba2_formula(s, tensors, x)
        torch.testing.assert_close(whole(mixer, x), want, atol=2e-5, rtol=0)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def mamba3_tensors(s: Mamba3Spec) -> dict[str, Tensor]:
    inner, both, width = s.num_heads * s.head_dim, s.num_groups * s.state_size, s.head_dim * s.mimo_rank
    shapes: dict[str, tuple[int, ...]] = {
        "in.weight": (2 * inner + 2 * both + s.num_heads, HIDDEN),
        "out.weight": (HIDDEN, inner),
        "lambda.weight": (s.num_heads, HIDDEN),
        "gated_norm.weight": (inner,),
        "bc_norm.weight": (s.state_size,),
        **dict.fromkeys(("D", "dt_bias"), (s.num_heads,)),
        **dict.fromkeys(("b_bias", "c_bias"), (s.num_heads, s.state_size)),
    }
    if s.complex_rope:
        shapes["theta.weight"] = (s.num_heads * s.state_size // 2, HIDDEN)
    if s.mimo_rank:
        shapes |= {"mimo_up.weight": (width, s.head_dim), "mimo_down.weight": (s.head_dim, width)}
    if s.conv_kernel:
        channels = inner + 2 * both
        shapes |= {"conv.weight": (channels, s.conv_kernel), "conv.bias": (channels,)}
    return {**normal(shapes), "A": -torch.rand(s.num_heads) * 4}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"complex_rope": False},
        {"mimo_rank": 3},
        {"conv_kernel": 4, "num_groups": 4},
        {"dt_limit": (0.0, 2.0)},
    ],
)
def test_mamba3_in_chunks_equals_whole(change: dict[str, Any]) -> None:
    s = replace(MAMBA3, **change)
    mixer = make(Mamba3, s, mamba3_tensors(s))
    a, b = torch.randn(21, HIDDEN), torch.randn(11, HIDDEN)
    got_a, got_b = in_pieces(mixer, a, b)
    torch.testing.assert_close(got_a, whole(mixer, a), atol=2e-5, rtol=0)
    torch.testing.assert_close(got_b, whole(mixer, b), atol=2e-5, rtol=0)


def mamba1_tensors(s: Mamba1Spec) -> dict[str, Tensor]:
    inner, size = s.inner_size, s.state_size
    tensors = normal(
        {
            "in.weight": (2 * inner, HIDDEN),
            "out.weight": (HIDDEN, inner),
            "x.weight": (s.dt_rank + 2 * size, inner),
            "dt.weight": (inner, s.dt_rank),
            "dt.bias": (inner,),
            "conv.weight": (inner, s.conv_kernel),
            "conv.bias": (inner,),
            "D": (inner,),
        }
    )
    return {**tensors, "A": -torch.rand(inner, size)}


def mamba1_formula(s: Mamba1Spec, t: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Gu & Dao 2023, algorithm 2, one token at a time."""
    u, z = (x @ t["in.weight"].T).chunk(2, -1)
    u = convolve(u, t)
    dt, b, c = (u @ t["x.weight"].T).split([s.dt_rank, s.state_size, s.state_size], -1)
    dt = torch.log1p(torch.exp(dt @ t["dt.weight"].T + t["dt.bias"]))
    state, y = torch.zeros(s.inner_size, s.state_size), torch.zeros_like(u)
    for n in range(len(x)):
        state = torch.exp(dt[n][:, None] * t["A"]) * state + (dt[n] * u[n])[:, None] * b[n]
        state = state if s.state_limit is None else state.clamp(-s.state_limit, s.state_limit)
        y[n] = state @ c[n] + t["D"] * u[n]
    return (y * z * torch.sigmoid(z)) @ t["out.weight"].T


@pytest.mark.parametrize("limit", [None, 0.05])
def test_mamba1_equals_its_formula_whole_and_in_chunks(limit: float | None) -> None:
    s = replace(MAMBA1, state_limit=limit)
    tensors = mamba1_tensors(s)
    if limit:
        tensors["A"] = -tensors["A"]  # a state that grows
    mixer = make(Mamba1, s, tensors)
    a, b = torch.randn(21, HIDDEN), torch.randn(11, HIDDEN)
    for got, x in zip(in_pieces(mixer, a, b), (a, b), strict=True):
        want = mamba1_formula(s, tensors, x)
        torch.testing.assert_close(whole(mixer, x), want, atol=2e-5, rtol=0)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_what_is_remembered() -> None:
    """Scans in float32, the convolution's tail in the model's own type; nothing for whole sequences."""
    state = make(Mamba2, MAMBA2, mamba2_tensors(MAMBA2)).states["mix"]
    assert state == SlotState({"conv": ((3, 44), "model"), "ssm": ((4, 6, 5), "float32")})
    exact = replace(MAMBA2, mode="exact")
    assert make(Mamba2, exact, mamba2_tensors(exact)).states == {}
    s = replace(MAMBA3, mimo_rank=2)
    assert make(Mamba3, s, mamba3_tensors(s)).states["mix"] == SlotState(
        {
            "ssm": ((4, 12, 4), "float32"),
            "prev_b": ((4, 4), "float32"),
            "prev_x": ((4, 12), "float32"),
            "angle": ((4, 2), "float32"),
        }
    )


@pytest.mark.parametrize("kind", [Mamba2, Mamba3])
def test_exact_mode_computes_each_sequence_of_a_batch_alone(kind: Any) -> None:
    s: Any = replace(MAMBA2 if kind is Mamba2 else MAMBA3, mode="exact", chunk_size=4)
    mixer = make(kind, s, mamba2_tensors(s) if kind is Mamba2 else mamba3_tensors(s))
    a, b = torch.randn(9, HIDDEN), torch.randn(6, HIDDEN)
    store = StateStore(mixer.states, {}, 2, 4, CPU, torch.float32)
    both = mixer(torch.cat([a, b]), batch([(0, 9), (0, 6)], [1, 1]), store)
    torch.testing.assert_close(both[:9], whole(mixer, a), atol=1e-6, rtol=0)
    torch.testing.assert_close(both[9:], whole(mixer, b), atol=1e-6, rtol=0)
