"""Norm and rotation of heads in one launch, of which the first or the last numbers are rotated, and stores.

A program has HB heads of a token as three tiles: the first and the second numbers of pairs, and the rest. A
head's sums are its own, in an order that sizes decide. Numbers are rounded where the ops that this replaces
round them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.place import _as_entry, _round_as, _sum_numbers
from plait.kernels.triton.attention.rope import pair_columns, rotate_pairs
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.row_views import pack_rows
from plait.ops.entry import CODED
from plait.ops.launch import launch
from plait.ops.place import NormWeights, Rotation, place_compressed, turn_heads
from plait.ops.registry import OpFacts

NAME = "triton"
TILE = 2048  # numbers of a program


@triton.jit
def turn_columns(
    j, r, D: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The columns of the first and of the second numbers of pairs `j`, and of the rest `r`."""
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    if LAST:
        first, second = first + (D - 2 * PAIRS), second + (D - 2 * PAIRS)
    else:
        r = r + 2 * PAIRS
    return first, second, r


@triton.jit
def turn_tile(
    at, weight, bias, position, inv_freq, is_head, j, r, eps, mscale,
    D: tl.constexpr, PAIRS: tl.constexpr, RESTP: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    BIAS: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads that begin `at` some places, [heads, 1], if `is_head`: three tiles of float32."""
    there, behind = is_head & (j < PAIRS), is_head & (r < D - 2 * PAIRS)
    first, second, column = turn_columns(j, r, D, PAIRS, LAST, INTERLEAVED)
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    rest = a
    if RESTP:
        rest = tl.load(at + column, mask=behind, other=0.0).to(tl.float32)
    if NORM:
        if LAYER:
            mean = _sum_numbers(a, b, rest, RESTP, False) / D
            a, b = tl.where(there, a - mean, 0.0), tl.where(there, b - mean, 0.0)
            if RESTP:
                rest = tl.where(behind, rest - mean, 0.0)
        unit = tl.rsqrt(_sum_numbers(a * a, b * b, rest * rest, RESTP, False) / D + eps)
        a = a * unit * tl.load(weight + first, mask=j < PAIRS, other=0.0).to(tl.float32)
        b = b * unit * tl.load(weight + second, mask=j < PAIRS, other=0.0).to(tl.float32)
        if RESTP:
            rest = rest * unit * tl.load(weight + column, mask=r < D - 2 * PAIRS, other=0.0).to(tl.float32)
        if BIAS:
            a += tl.load(bias + first, mask=j < PAIRS, other=0.0).to(tl.float32)
            b += tl.load(bias + second, mask=j < PAIRS, other=0.0).to(tl.float32)
            if RESTP:
                rest += tl.load(bias + column, mask=r < D - 2 * PAIRS, other=0.0).to(tl.float32)
        a, b = _round_as(a, at), _round_as(b, at)
    a, b = rotate_pairs(a, b, position, inv_freq, j, mscale, PAIRS)
    return a, b, rest


@triton.jit
def store_tile(
    to, like, a, b, rest, is_head, j, r,
    D: tl.constexpr, PAIRS: tl.constexpr, RESTP: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """What `turn_tile` gave, rounded as `like` has it, to heads that begin at `to`."""
    there, behind = is_head & (j < PAIRS), is_head & (r < D - 2 * PAIRS)
    first, second, column = turn_columns(j, r, D, PAIRS, LAST, INTERLEAVED)
    tl.store(to + first, _as_entry(a.to(like.dtype.element_ty), to), mask=there)
    tl.store(to + second, _as_entry(b.to(like.dtype.element_ty), to), mask=there)
    if RESTP:
        tl.store(to + column, _as_entry(rest.to(like.dtype.element_ty), to), mask=behind)


@triton.jit
def turn_head_rows(
    x, weight, bias, positions, inv_freq, out, x_row, x_head, eps, mscale,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr, RESTP: tl.constexpr,
    HB: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x: [T, H, D] -> out: [T, H, D], with 2 PAIRS columns rotated. Grid: (T, blocks of HB heads)."""
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
    j, r = tl.arange(0, PAIRSP)[None, :], tl.arange(0, max(RESTP, 1))[None, :]
    a, b, rest = turn_tile(
        # 32 bits hold the heads of a row
        x + token * x_row + head * x_head, weight, bias, tl.load(positions + token), inv_freq, head < H, j, r,
        eps, mscale, D, PAIRS, RESTP, NORM, LAYER, BIAS, LAST, INTERLEAVED,
    )  # fmt: skip
    to = out + (token * H + head) * D
    store_tile(to, out, a, b, rest, head < H, j, r, D, PAIRS, RESTP, LAST, INTERLEAVED)


@triton.jit
def place_turned_rows(
    q, latent, entries, q_weight, latent_weight, entry_weight, inv_freq, positions, firsts, near_slots,
    far_slots, out, cache, packed, q_row, q_head, latent_row, entry_row, q_eps, latent_eps, entry_eps, mscale,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr, RESTP: tl.constexpr,
    HB: tl.constexpr, RATE: tl.constexpr, STEP: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """See `ops.place.place_compressed`. Grid: (T, 2 + blocks of HB heads): the latent, the entry, queries."""
    await_previous()
    row, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, r = tl.arange(0, PAIRSP)[None, :], tl.arange(0, max(RESTP, 1))[None, :]
    within, position = tl.arange(0, HB)[:, None], tl.load(positions + row)
    if p == 0:
        a, b, rest = turn_tile(
            latent + row * latent_row + within * 0, latent_weight, latent_weight, position, inv_freq,
            within < 1, j, r, latent_eps, mscale, D, PAIRS, RESTP, True, False, False, True, INTERLEAVED,
        )  # fmt: skip
        slot = cache + tl.load(near_slots + row).to(tl.int64) * D + within * 0
        store_tile(slot, latent, a, b, rest, within < 1, j, r, D, PAIRS, RESTP, True, INTERLEAVED)
    elif p == 1:
        if RATE:
            is_last = (within < 1) & ((position + 1) % RATE == 0)
            a, b, rest = turn_tile(
                entries + row * entry_row + within * 0, entry_weight, entry_weight, tl.load(firsts + row),
                inv_freq, is_last, j, r, entry_eps, mscale, D, PAIRS, RESTP, True, False, False, True,
                INTERLEAVED,
            )  # fmt: skip
            place = packed + tl.load(far_slots + row).to(tl.int64) // STEP * D + within * 0
            store_tile(place, entries, a, b, rest, is_last, j, r, D, PAIRS, RESTP, True, INTERLEAVED)
    else:
        head = (p - 2) * HB + within
        a, b, rest = turn_tile(
            # 32 bits hold the heads of a row
            q + row * q_row + head * q_head, q_weight, q_weight, position, inv_freq, head < H, j, r,
            q_eps, mscale, D, PAIRS, RESTP, NORM, False, False, True, INTERLEAVED,
        )  # fmt: skip
        to = out + (row * H + head) * D
        store_tile(to, out, a, b, rest, head < H, j, r, D, PAIRS, RESTP, True, INTERLEAVED)


def _constants(
    heads: int, dim: int, pairs: int, norm: NormWeights | None, is_interleaved: bool, is_last: bool
) -> dict[str, int]:
    rest, wide = dim - 2 * pairs, triton.next_power_of_2(dim)
    return {
        "H": heads,
        "D": dim,
        "PAIRS": pairs,
        "PAIRSP": triton.next_power_of_2(pairs),
        "RESTP": triton.next_power_of_2(rest) if rest else 0,
        "HB": min(max(TILE // wide, 1), triton.next_power_of_2(heads)),
        "NORM": norm is not None,
        "LAYER": norm is not None and norm.is_layer,
        "BIAS": norm is not None and norm.bias is not None,
        "LAST": is_last,
        "INTERLEAVED": is_interleaved,
        "num_warps": 4 if heads > 1 else 2,
    }


@turn_heads.variant(NAME, on="cuda")
def turn(x: Tensor, positions: Tensor, norm: NormWeights | None, rotation: Rotation, is_last: bool) -> Tensor:
    """`turn_heads`: the same arguments and result."""
    x = pack_rows(x)
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _constants(heads, dim, len(rotation.inv_freq), norm, rotation.interleaved, is_last)
    weight, bias = (norm.weight, norm.bias) if norm else (x, x)
    launch(
        turn_head_rows, (tokens, -(-heads // sizes["HB"])), x, weight, x if bias is None else bias, positions,
        rotation.inv_freq, out, x.stride(0), x.stride(1), norm.eps if norm else 0.0, rotation.mscale, **sizes,
    )  # fmt: skip
    return out


def why_not(facts: OpFacts) -> str | None:
    """The `when` of the store: norms are of the one kind that models have, and entries are numbers."""
    if (kept := facts.sizes.get("kv_dtype")) in CODED:
        return f"it keeps float32 or bfloat16, not {kept}"
    return None if facts.sizes.get("norm", "rms") == "rms" else "norms are RMS norms"


@place_compressed.variant(NAME, on="cuda", when=why_not)
def place(
    q: Tensor,
    latent: Tensor,
    entries: Tensor | None,
    cache: Tensor,
    packed: Tensor | None,
    slots: tuple[Tensor, Tensor],
    positions: Tensor,
    firsts: Tensor | None,
    norms: tuple[NormWeights | None, NormWeights, NormWeights],
    rotation: Rotation,
    rate: int,
    step: int,
) -> Tensor:
    """`place_compressed`: the same arguments and result."""
    q, latent = pack_rows(q), pack_rows(latent)
    entries = latent if entries is None else pack_rows(entries)
    (tokens, heads, dim), packed = q.shape, cache if packed is None else packed
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = _place_sizes(heads, dim, len(rotation.inv_freq), norms[0], rotation.interleaved)
    each = (norms[0] or norms[1], *norms[1:])
    launch(
        place_turned_rows, (tokens, 2 + -(-heads // sizes["HB"])), q, latent, entries,
        *(norm.weight for norm in each), rotation.inv_freq, positions,
        positions if firsts is None else firsts, *slots, out, cache, packed, q.stride(0), q.stride(1),
        latent.stride(0), entries.stride(0), *(norm.eps for norm in each), rotation.mscale, RATE=rate,
        STEP=step, **sizes,
    )  # fmt: skip
    return out


def _place_sizes(
    heads: int, dim: int, pairs: int, norm: NormWeights | None, is_interleaved: bool
) -> dict[str, int]:
    given = _constants(heads, dim, pairs, norm, is_interleaved, True)
    found = {name: value for name, value in given.items() if name not in ("LAYER", "BIAS", "LAST")}
    return found if norm else found | {"num_warps": 8}  # with 4, forms of sm_80 spill


POINTERS = {
    **dict.fromkeys(("x", "out", "q", "latent", "entries", "cache", "packed"), "bf16*"),
    **dict.fromkeys(("weight", "bias", "inv_freq", "q_weight", "latent_weight", "entry_weight"), "fp32*"),
    **dict.fromkeys(("positions", "firsts", "near_slots", "far_slots"), "i64*"),
    **dict.fromkeys(("x_row", "x_head", "q_row", "q_head", "latent_row", "entry_row"), "i32!"),
    **dict.fromkeys(("eps", "q_eps", "latent_eps", "entry_eps", "mscale"), "fp32"),
}
SHAPES = {  # heads, columns, pairs, whether there is a norm, pairs are neighbours, and the last are rotated
    "64 × 512": (64, 512, 32, True, True, True),
    "64 × 512 without norm": (64, 512, 32, False, True, True),
    "1 × 512": (1, 512, 32, True, True, True),
    "64 × 128": (64, 128, 32, False, True, True),
    "1 × 128": (1, 128, 32, True, True, True),
    "first of 8 × 128": (8, 128, 32, True, False, False),
    "first of 1 × 128": (1, 128, 32, True, False, False),
    "last of 64 × 128, halves": (64, 128, 32, False, False, True),
    "last of 64 × 128, halves, norm": (64, 128, 32, True, False, True),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Heads and entries of published sizes."""
    numbers = torch.empty(0, device="meta")
    for name, (heads, dim, pairs, has_norm, is_interleaved, is_last) in SHAPES.items():
        norm = NormWeights(numbers, None, 1e-6, False) if has_norm else None
        constants = _constants(heads, dim, pairs, norm, is_interleaved, is_last)
        warps = constants.pop("num_warps")
        yield KernelForm(f"turn_head_rows, {name}", turn_head_rows, POINTERS, constants, warps)
    wide = dict.fromkeys(("cache", "packed"), "fp32*")
    narrow = dict.fromkeys(("out", "q", "latent", "entries"), "fp32*")
    norm = NormWeights(numbers, None, 1e-6, False)
    bare = ", heads without norm"
    layers = (("", 4, norm), (", window", 0, norm), (bare, 1, None), (f", window{bare}", 0, None))
    for name, rate, own in layers:
        constants = _place_sizes(64, 512, 32, own, True) | {"RATE": rate, "STEP": max(rate, 1)}
        warps = constants.pop("num_warps")
        for kept, types in (("", {}), (" over float32", wide), (", float32 over bfloat16", narrow)):
            full = f"place_turned_rows{name}{kept}"
            yield KernelForm(full, place_turned_rows, POINTERS | types, constants, warps)
