"""Norm, rotation and store of queries, keys and values between projection and attention, in one launch.

A program takes some heads of one token, and a tile of it has two halves: the first and the second numbers of
the pairs that are rotated together, in either form of pairs. What is not rotated is a third tile. A head's
sums are of that head alone, or of all heads of the token in one program, in an order that sizes decide; so
the bits depend on no other token. Numbers are rounded where the ops that this replaces round them.

Codes (`ops.entry`) are written as bytes, their scales as words of 16 bits, where `attention` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.mix import count_stages, mix_columns
from plait.kernels.triton.attention.rope import pair_columns, rotate_pairs
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_half, with_float16, with_float32
from plait.ops.entry import Codes, key_codes, latent_codes, value_codes
from plait.ops.launch import launch
from plait.ops.place import HeadNorms, NormWeights, Rotation, place_heads, place_latent
from plait.ops.registry import OpFacts

NAME = "triton"
HEADS = 8  # of a program, where no norm is over all
LATENT_HEADS = 4
OVER = {"head": 1, "each": 2, "all": 3}


@triton.jit
def entry_places(
    block, inside, D: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Where the entries (block, inside) of a cache are, and the words of their scales: see `attention`."""
    if GROUP and not REST:
        groups: tl.constexpr = (D + GROUP - 1) // GROUP
        at = block * (PAGE_ROWS * WIDTH) + inside * D
        scales = block * (PAGE_ROWS * WIDTH // 2) + PAGE_ROWS * D // 2 + inside * groups
    else:
        at = (block * PAGE_ROWS + inside) * WIDTH
        scales = (block * PAGE_ROWS + inside) * (WIDTH // 2) + D // 2
    return at, scales


@triton.jit
def _sum_numbers(a, b, rest, RESTP: tl.constexpr, ALL: tl.constexpr):
    """The sum of each head's numbers, or of all heads', [heads, 1]."""
    total = tl.sum(a, 1) + tl.sum(b, 1)
    if RESTP:
        total += tl.sum(rest, 1)
    if ALL:
        total = tl.sum(total, 0) + tl.zeros_like(total)
    return total[:, None]


@triton.jit
def _round_as(numbers, like):
    """float32 numbers as the dtype that a pointer points to has them."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _load_weights(weight, head, column, there, D: tl.constexpr, OVER: tl.constexpr):
    """A norm's weights: of a column, or of a column of a head."""
    at = column + (head * D if OVER > 1 else head * 0)
    return tl.load(weight + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _finish_heads(
    x, weight, bias, inv_freq, position, head, j, r, eps, mscale, x_head,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, RESTP: tl.constexpr, OVER: tl.constexpr,
    LAYER: tl.constexpr, BIAS: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads of a token, normed and rotated: (first numbers of pairs, second ones, the rest) in float32.

    x: the token's first head; head: [heads, 1], j: [1, pairs], r: [1, rest].
    """
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    there, behind = (head < HEADS) & (j < PAIRS), (head < HEADS) & (r < D)
    # 32 bits hold the heads of a row
    at = x + head * x_head
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    rest = a
    if RESTP:
        rest = tl.load(at + r, mask=behind, other=0.0).to(tl.float32)
    if OVER:
        count: tl.constexpr = D * HEADS if OVER == 3 else D
        if LAYER:
            mean = _sum_numbers(a, b, rest, RESTP, OVER == 3) / count
            a, b = tl.where(there, a - mean, 0.0), tl.where(there, b - mean, 0.0)
            if RESTP:
                rest = tl.where(behind, rest - mean, 0.0)
        unit = tl.rsqrt(_sum_numbers(a * a, b * b, rest * rest, RESTP, OVER == 3) / count + eps)
        a = a * unit * _load_weights(weight, head, first, there, D, OVER)
        b = b * unit * _load_weights(weight, head, second, there, D, OVER)
        if RESTP:
            rest = rest * unit * _load_weights(weight, head, r, behind, D, OVER)
        if BIAS:
            a += _load_weights(bias, head, first, there, D, OVER)
            b += _load_weights(bias, head, second, there, D, OVER)
            if RESTP:
                rest += _load_weights(bias, head, r, behind, D, OVER)
        a, b, rest = _round_as(a, x), _round_as(b, x), _round_as(rest, x)
    if TURNS:
        a, b = rotate_pairs(a, b, position, inv_freq, j, mscale, PAIRS)
    return a.to(x.dtype.element_ty), b.to(x.dtype.element_ty), rest.to(x.dtype.element_ty)


@triton.jit
def _as_entry(x, to):
    """Numbers as the cache has them; bfloat16 by its bits, since the interpreter rounds it towards zero."""
    if to.dtype.element_ty == tl.bfloat16 and x.dtype != tl.bfloat16:
        y = _bfloat16_bits(x.to(tl.float32)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(to.dtype.element_ty)
    return y


@triton.jit
def _store_heads(
    to, a, b, rest, head, j, r, to_head,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, RESTP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads as numbers; to: where the token's first head is."""
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    there, line = (head < HEADS) & (j < PAIRS), to + head * to_head
    tl.store(line + first, _as_entry(a, to), mask=there)
    tl.store(line + second, _as_entry(b, to), mask=there)
    if RESTP:
        tl.store(line + r, _as_entry(rest, to), mask=(head < HEADS) & (r < D))


@triton.jit
def _bfloat16_bits(x):
    """The bits of numbers as bfloat16, rounded to nearest even; of what is no number, of a quiet NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _scale_bits(largest):
    """The scale of codes, largest / 127, as the bits of a bfloat16."""
    return _bfloat16_bits(tl.div_rn(largest, tl.full([], 127.0, tl.float32) + tl.zeros_like(largest)))


@triton.jit
def _group_scales(x, there, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr):
    """(bits of the scales of each row's groups of GROUP columns, the scale of each column). x: [ROWS, DP].

    A scale is that of the largest magnitude; of what is no number that is infinity.
    """
    size = tl.where(there, tl.where(x == x, tl.abs(x), float("inf")), 0.0)
    if GROUP >= D:
        bits = _scale_bits(tl.max(size, 1)[:, None])
        step = (bits << 16).to(tl.float32, bitcast=True) + tl.zeros_like(x)
    else:
        apart = tl.reshape(size, [ROWS, DP // GROUP, GROUP])
        bits = _scale_bits(tl.max(apart, 2))
        each = (bits << 16).to(tl.float32, bitcast=True)[:, :, None] + tl.zeros_like(apart)
        step = tl.reshape(each, [ROWS, DP])
    return bits, step


@triton.jit
def _code(x, step):
    """x / step, rounded to nearest even, within ±127."""
    ratio = tl.where(step > 0.0, tl.div_rn(x, tl.where(step > 0.0, step, 1.0)), 0.0)
    ratio = tl.where(ratio == ratio, ratio, 0.0)  # of infinities; their step is one, too
    ratio = tl.where(ratio > 127.0, 127.0, tl.where(ratio < -127.0, -127.0, ratio))
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _store_codes(
    cache, words, block, inside, x, x_head, head,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Heads of a token, the one of this number inside its block, as codes and scales. x: the first one."""
    at, scales = entry_places(block, inside * HEADS + head, D, 0, WIDTH, PAGE * HEADS, GROUP)
    c = tl.arange(0, DP)[None, :]
    there = (head < HEADS) & (c < D)
    # 32 bits hold the heads of a row
    numbers = tl.load(x + head * x_head + c, mask=there, other=0.0).to(tl.float32)
    numbers = mix_columns(numbers, ROWS, DP, STAGES)
    bits, step = _group_scales(numbers, there, ROWS, D, DP, GROUP)
    g = tl.arange(0, bits.shape[1])[None, :]
    tl.store(words + scales + g, bits.to(tl.int16), mask=(head < HEADS) & (g * GROUP < D))
    tl.store(cache + at + c, _code(numbers, step), mask=there)


@triton.jit
def place_head_rows(
    q, k, v, q_weight, k_weight, q_bias, k_bias, inv_freq, positions, slot_mapping,
    out, k_cache, v_cache, k_words, v_words, ready, q_row, k_row, v_row, x_head, q_eps, k_eps, mscale,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr,
    RESTP: tl.constexpr, HB: tl.constexpr, Q_BLOCKS: tl.constexpr, OVER: tl.constexpr, LAYER: tl.constexpr,
    BIAS: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See `ops.place.place_heads`. Grid: (T, blocks of HB heads: Q_BLOCKS of queries, then keys, values).

    ready: [T, KVH, D], where keys that become codes wait: pairs as they are rotated are not columns in order.
    """
    await_previous()
    token, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_blocks: tl.constexpr = (KVH + HB - 1) // HB
    position, slot = tl.load(positions + token), tl.load(slot_mapping + token).to(tl.int64)
    j, r = tl.arange(0, PAIRSP)[None, :], 2 * PAIRS + tl.arange(0, max(RESTP, 1))[None, :]
    within = tl.arange(0, HB)[:, None]
    if p < Q_BLOCKS:
        head = p * HB + within
        a, b, rest = _finish_heads(
            q + token * q_row, q_weight, q_bias, inv_freq, position, head, j, r, q_eps, mscale, x_head,
            H, D, PAIRS, RESTP, OVER, LAYER, BIAS, TURNS, INTERLEAVED,
        )  # fmt: skip
        _store_heads(out + token * (H * D), a, b, rest, head, j, r, D, H, D, PAIRS, RESTP, INTERLEAVED)
    elif p < Q_BLOCKS + k_blocks:
        head = (p - Q_BLOCKS) * HB + within
        a, b, rest = _finish_heads(
            k + token * k_row, k_weight, k_bias, inv_freq, position, head, j, r, k_eps, mscale, x_head,
            KVH, D, PAIRS, RESTP, OVER, LAYER, BIAS, TURNS, INTERLEAVED,
        )  # fmt: skip
        if GROUP:
            line = ready + token * (KVH * D)
            _store_heads(line, a, b, rest, head, j, r, D, KVH, D, PAIRS, RESTP, INTERLEAVED)
            tl.debug_barrier()  # threads read what others of this program wrote
            _store_codes(
                k_cache, k_words, slot // PAGE, slot % PAGE, line, D, head, HB, KVH, D, DP, KW, PAGE, GROUP,
                STAGES,
            )  # fmt: skip
        else:
            to = k_cache + slot * (KVH * KW)
            _store_heads(to, a, b, rest, head, j, r, KW, KVH, D, PAIRS, RESTP, INTERLEAVED)
    else:
        head = (p - Q_BLOCKS - k_blocks) * HB + within
        if GROUP:
            _store_codes(
                v_cache, v_words, slot // PAGE, slot % PAGE, v + token * v_row, x_head, head,
                HB, KVH, D, DP, VW, PAGE, D, STAGES,
            )  # fmt: skip
        else:
            a, b, rest = _finish_heads(
                v + token * v_row, k_weight, k_bias, inv_freq, position, head, j, r, k_eps, mscale, x_head,
                KVH, D, PAIRS, RESTP, 0, False, False, False, INTERLEAVED,
            )  # fmt: skip
            to = v_cache + slot * (KVH * VW)
            _store_heads(to, a, b, rest, head, j, r, VW, KVH, D, PAIRS, RESTP, INTERLEAVED)


@triton.jit
def _load_pairs(
    at, there, position, inv_freq, j, mscale,
    PAIRS: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Numbers that are rotated, as pairs: in float32, rounded to their dtype."""
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    if TURNS:
        a, b = rotate_pairs(a, b, position, inv_freq, j, mscale, PAIRS)
    return _round_as(a, at), _round_as(b, at)


@triton.jit
def _store_latent(
    latent, weight, bias, a, b, cache, words, slot, c, j, eps,
    R: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, REST_AT: tl.constexpr,
):  # fmt: skip
    """A token's latent, normed, and the rotated key (a, b) behind it."""
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    h = tl.load(latent + c, mask=c < R, other=0.0).to(tl.float32)
    if NORM:
        if LAYER:
            h = tl.where(c < R, h - (tl.sum(h, 1) / R)[:, None], 0.0)
        unit = tl.rsqrt(tl.sum(h * h, 1) / R + eps)[:, None]
        h = h * unit * tl.load(weight + c, mask=c < R, other=0.0).to(tl.float32)
        if BIAS:
            h += tl.load(bias + c, mask=c < R, other=0.0).to(tl.float32)
        h = _round_as(h, latent)
    line = cache + slot * WIDTH
    if GROUP:
        bits, step = _group_scales(h, c < R, 1, R, h.shape[1], GROUP)
        g = tl.arange(0, bits.shape[1])[None, :]
        tl.store(words + slot * (WIDTH // 2) + R // 2 + g, bits.to(tl.int16), mask=g * GROUP < R)
        tl.store(line + c, _code(h, step), mask=c < R)
        rest = words + slot * (WIDTH // 2) + REST_AT // 2
        tl.store(rest + first, _bfloat16_bits(a).to(tl.int16), mask=j < PAIRS)
        tl.store(rest + second, _bfloat16_bits(b).to(tl.int16), mask=j < PAIRS)
    else:
        tl.store(line + c, _as_entry(h, cache), mask=c < R)
        tl.store(line + R + first, _as_entry(a, cache), mask=j < PAIRS)
        tl.store(line + R + second, _as_entry(b, cache), mask=j < PAIRS)


@triton.jit
def place_latent_rows(
    q, q_rope, latent, k_rope, weight, bias, inv_freq, positions, slot_mapping, out, cache, words,
    q_row, q_head, rope_row, rope_head, latent_row, k_row, eps, mscale,
    H: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr,
    HB: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, REST_AT: tl.constexpr,
):  # fmt: skip
    """See `ops.place.place_latent`. Grid: (T, 1 + blocks of HB heads); the first stores the latent."""
    await_previous()
    token, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    c, j = tl.arange(0, RP)[None, :], tl.arange(0, PAIRSP)[None, :]
    if p == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        own_a, own_b = _load_pairs(
            k_rope + token * k_row, j < PAIRS, position, inv_freq, j, mscale, PAIRS, TURNS, INTERLEAVED
        )
        _store_latent(
            latent + token * latent_row, weight, bias, own_a, own_b, cache, words, slot, c, j, eps,
            R, PAIRS, NORM, LAYER, BIAS, INTERLEAVED, WIDTH, GROUP, REST_AT,
        )  # fmt: skip
    else:
        head = (p - 1) * HB + tl.arange(0, HB)[:, None]
        first, second = pair_columns(j, PAIRS, INTERLEAVED)
        there, to = (head < H) & (c < R), out + (token * H + head) * (R + 2 * PAIRS)
        # 32 bits hold the heads of a row
        tl.store(to + c, tl.load(q + token * q_row + head * q_head + c, mask=there, other=0.0), mask=there)
        turned = (head < H) & (j < PAIRS)
        a, b = _load_pairs(
            # 32 bits hold the heads of a row
            q_rope + token * rope_row + head * rope_head, turned, position, inv_freq, j, mscale,
            PAIRS, TURNS, INTERLEAVED,
        )  # fmt: skip
        tl.store(to + R + first, a.to(out.dtype.element_ty), mask=turned)
        tl.store(to + R + second, b.to(out.dtype.element_ty), mask=turned)


def _head_sizes(
    heads: int,
    kv_heads: int,
    dim: int,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    coded: bool,
) -> dict[str, int]:
    """The constants that follow from sizes. Codes take registers, so they have those of twice the warps."""
    pairs = len(rotation.inv_freq) if rotation else dim // 2
    rest, wide = dim - 2 * pairs, triton.next_power_of_2(pairs)
    rest_wide = triton.next_power_of_2(rest) if rest else 0
    most = triton.next_power_of_2(heads)
    block = most if norms and norms.over == "all" else min(HEADS, most)
    each = 256 if coded else 512
    return {
        "H": heads,
        "KVH": kv_heads,
        "D": dim,
        "PAIRS": pairs,
        "PAIRSP": wide,
        "RESTP": rest_wide,
        "HB": block,
        "Q_BLOCKS": -(-heads // block) if norms or rotation else 0,
        "OVER": OVER[norms.over] if norms else 0,
        "LAYER": norms.q.is_layer if norms else False,
        "BIAS": norms.q.bias is not None if norms else False,
        "TURNS": rotation is not None,
        "INTERLEAVED": rotation.interleaved if rotation else False,
        "num_warps": min(triton.next_power_of_2(max(block * (2 * wide + rest_wide) // each, 1)), 8),
    }


def _entry_sizes(form: Codes | None, widths: tuple[int, int], page: int) -> dict[str, int]:
    made = {"KW": widths[0], "VW": widths[1], "PAGE": page, "GROUP": 0, "DP": 1, "STAGES": 0}
    if form:
        stages = count_stages(form.mixed)
        made |= {"GROUP": form.group, "DP": triton.next_power_of_2(form.columns), "STAGES": stages}
    return made


def _words(cache: Tensor) -> Tensor:
    """The same memory as int16, where scales of codes are written."""
    return cache.view(torch.int16) if cache.dtype is torch.int8 else cache


def _pack_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def why_no_codes(facts: OpFacts) -> str | None:
    """The `when` of kernels that read and write caches of numbers or int8."""
    kept = facts.sizes.get("kv_dtype")
    return f"it keeps float32, bfloat16 or int8, not {kept}" if kept in ("int7", "int4") else None


def why_no_heads(facts: OpFacts) -> str | None:
    """The `when` of heads."""
    if "v_dim" in facts.sizes and facts.sizes["v_dim"] != facts.sizes.get("dim"):
        return "values are as wide as keys"
    return why_no_codes(facts)


@place_heads.variant(NAME, on="cuda", when=why_no_heads)
def place_all_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation | None,
) -> Tensor:
    """`place_heads`: the same arguments and result."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    q, k, v = (t if t.stride(-1) == 1 and t.stride(1) == dim else t.contiguous() for t in (q, k, v))
    form = key_codes(dim) if k_cache.dtype is torch.int8 else None
    sizes = _head_sizes(heads, kv_heads, dim, norms, rotation, form is not None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if sizes["Q_BLOCKS"] else q
    weights: list[Tensor] = [q, q, q, q]
    if norms:
        biases = (part.bias if part.bias is not None else q for part in (norms.q, norms.k))
        weights = [norms.q.weight, norms.k.weight, *biases]
    ready = torch.empty(tokens, kv_heads, dim, dtype=q.dtype, device=q.device) if form else q
    blocks = sizes["Q_BLOCKS"] + 2 * -(-kv_heads // sizes["HB"])
    launch(
        place_head_rows, (tokens, blocks), q, k, v, *weights, rotation.inv_freq if rotation else q, positions,
        slot_mapping, out, k_cache, v_cache, _words(k_cache), _words(v_cache), ready, q.stride(0),
        k.stride(0), v.stride(0), dim, norms.q.eps if norms else 0.0, norms.k.eps if norms else 0.0,
        rotation.mscale if rotation else 1.0, **sizes,
        **_entry_sizes(form, (k_cache.shape[-1], v_cache.shape[-1]), k_cache.shape[1]),
    )  # fmt: skip
    return out


def _latent_sizes(
    heads: int, rank: int, rope_dim: int, norm: NormWeights | None, rotation: Rotation | None
) -> dict[str, int]:
    return {
        "H": heads,
        "R": rank,
        "RP": triton.next_power_of_2(rank),
        "PAIRS": rope_dim // 2,
        "PAIRSP": triton.next_power_of_2(rope_dim // 2),
        "HB": min(LATENT_HEADS, triton.next_power_of_2(heads)),
        "NORM": norm is not None,
        "LAYER": norm.is_layer if norm else False,
        "BIAS": norm.bias is not None if norm else False,
        "TURNS": rotation is not None,
        "INTERLEAVED": rotation.interleaved if rotation else False,
        "num_warps": 4,
    }


def _latent_entry(form: Codes | None, width: int) -> dict[str, int]:
    return {"WIDTH": width, "GROUP": form.group if form else 0, "REST_AT": form.rest_at if form else 0}


@place_latent.variant(NAME, on="cuda", when=why_no_codes)
def place_whole_latent(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    norm: NormWeights | None,
    rotation: Rotation | None,
) -> Tensor:
    """`place_latent`: the same arguments and result."""
    q, q_rope, latent, k_rope = (_pack_rows(t) for t in (q, q_rope, latent, k_rope))
    (tokens, heads, rank), rope_dim = q.shape, q_rope.shape[-1]
    out = torch.empty(tokens, heads, rank + rope_dim, dtype=q.dtype, device=q.device)
    form = latent_codes(rank, rope_dim) if cache.dtype is torch.int8 else None
    sizes = _latent_sizes(heads, rank, rope_dim, norm, rotation)
    launch(
        place_latent_rows, (tokens, 1 + -(-heads // sizes["HB"])), q, q_rope, latent, k_rope,
        norm.weight if norm else q, norm.bias if norm and norm.bias is not None else q,
        rotation.inv_freq if rotation else q, positions, slot_mapping, out, cache, _words(cache),
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), latent.stride(0), k_rope.stride(0),
        norm.eps if norm else 0.0, rotation.mscale if rotation else 1.0, **sizes,
        **_latent_entry(form, cache.shape[-1]),
    )  # fmt: skip
    return out


STRIDES = ("q_row", "k_row", "v_row", "x_head", "q_head", "rope_row", "rope_head", "latent_row")
POINTERS: dict[str, str] = {
    **dict.fromkeys(("q", "k", "v", "q_rope", "latent", "k_rope", "out", "cache", "words", "ready"), "bf16*"),
    **dict.fromkeys(("k_cache", "v_cache", "k_words", "v_words"), "bf16*"),
    **dict.fromkeys(("q_weight", "k_weight", "q_bias", "k_bias", "weight", "bias", "inv_freq"), "fp32*"),
    **dict.fromkeys(("positions", "slot_mapping"), "i64*"),
    **dict.fromkeys(STRIDES, "i32!"),
    **dict.fromkeys(("q_eps", "k_eps", "eps", "mscale"), "fp32"),
}
CODES: dict[str, str] = {
    **dict.fromkeys(("k_cache", "v_cache", "cache"), "i8*"),
    **dict.fromkeys(("k_words", "v_words", "words"), "i16*"),
}
Over = Literal["head", "each", "all"]
Shape = tuple[int, int, int, int, bool, Over | None, bool]
SHAPES: dict[str, Shape] = {  # heads, kv_heads, dim, pairs, interleaved, norm over, codes
    "32/8 d128": (32, 8, 128, 64, False, None, False),
    "32/8 d128 head norm": (32, 8, 128, 64, False, "head", False),
    "32/8 d128 norm over all": (32, 8, 128, 64, False, "all", False),
    "9/3 d64": (9, 3, 64, 32, False, None, False),
    "32/32 d80, 32 rotated": (32, 32, 80, 16, False, None, False),
    "32/32 d96": (32, 32, 96, 48, False, None, False),
    "8/4 d256 head norm": (8, 4, 256, 128, False, "head", False),
    "8/2 d512 head norm": (8, 2, 512, 256, False, "head", False),
    "16/2 d256, 64 rotated": (16, 2, 256, 32, False, "head", False),
    "64/8 d128 pairs": (64, 8, 128, 64, True, None, False),
    "32/8 d128 codes": (32, 8, 128, 64, False, "head", True),
    "8/2 d512 codes": (8, 2, 512, 256, False, "head", True),
    "32/8 d128 codes without norm": (32, 8, 128, 64, False, None, True),
    "32/32 d80 codes, 32 rotated": (32, 32, 80, 16, False, None, True),
    "64/8 d128 codes, pairs": (64, 8, 128, 64, True, None, True),
    "32/32 d128 codes, 64 rotated in pairs": (32, 32, 128, 32, True, None, True),
    "32/8 d128 unrotated codes, head norm": (32, 8, 128, 0, False, "head", True),
    "64/8 d128 codes, layer norm, pairs": (64, 8, 128, 64, True, "each", True),
    "48/8 d128 codes, norm over all, 64 rotated": (48, 8, 128, 32, False, "all", True),
    "32/32 d80 codes, layer norm, 32 rotated": (32, 32, 80, 16, False, "each", True),
    "64/8 d128 codes, head norm, pairs": (64, 8, 128, 64, True, "head", True),
    "32/32 d128 codes, layer norm with bias": (32, 32, 128, 64, False, "head", True),
    "32/8 d128 layer norm": (32, 8, 128, 64, False, "head", False),
    "64/8 d128 layer norm, pairs": (64, 8, 128, 64, True, "each", False),
    "32/32 d80 layer norm, 32 rotated": (32, 32, 80, 16, False, "head", False),
    "32/32 d80 layer norm with bias, 32 rotated": (32, 32, 80, 16, False, "head", False),
    "32/32 d64 layer norm with bias": (32, 32, 64, 32, False, "head", False),
    "64/8 d128 head norm, pairs": (64, 8, 128, 64, True, "head", False),
    "32/32 d128, 64 rotated in pairs": (32, 32, 128, 32, True, None, False),
    "32/32 d128 unrotated": (32, 32, 128, 0, False, None, False),
    "32/32 d128 unrotated codes": (32, 32, 128, 0, False, None, True),
    "32/8 d128 unrotated head norm": (32, 8, 128, 0, False, "head", False),
}


def forms() -> Iterator[KernelForm]:
    """Heads and latents of published sizes, and those of a float16 model that keeps others as int8."""
    yield from _usual_forms()
    usual = next(form for form in _usual_forms() if form.name == "place_head_rows, 32/8 d128 head norm")
    kept = dict.fromkeys(("k_cache", "v_cache", "k_words", "v_words"), "bf16*")
    yield replace(usual, name=f"{usual.name}, float16 over bfloat16", types=as_half(usual.types) | kept)


@with_float16
@with_float32
def _usual_forms() -> Iterator[KernelForm]:

    def norm(size: int, is_layer: bool = False, has_bias: bool = False) -> NormWeights:
        numbers = torch.empty(size, device="meta")
        return NormWeights(numbers, numbers if has_bias else None, 1e-6, is_layer)

    def turns(pairs: int, is_interleaved: bool) -> Rotation:
        return Rotation(torch.empty(pairs, device="meta"), 1.0, is_interleaved)

    for name, (heads, kv_heads, dim, pairs, paired, over, coded) in SHAPES.items():
        each = norm(dim, "layer norm" in name, "bias" in name)
        norms = HeadNorms(each, each, over) if over else None
        form = key_codes(dim) if coded else None
        widths = (form.width, value_codes(dim).width) if form else (dim, dim)
        rotation = turns(pairs, paired) if pairs else None
        constants = _head_sizes(heads, kv_heads, dim, norms, rotation, coded)
        constants |= _entry_sizes(form, widths, 64)
        warps = constants.pop("num_warps")
        types = POINTERS | (CODES if coded else {})
        wide: tuple[tuple[str, ...], ...] = () if paired else (("LDG.128", "LDG.64"),)
        yield KernelForm(f"place_head_rows, {name}", place_head_rows, types, constants, warps, demands=wide)
    for name, heads, coded in (
        ("16 heads", 16, False),
        ("128 heads", 128, False),
        ("16 heads codes", 16, True),
        ("16 heads halves", 16, False),
        ("16 heads halves codes", 16, True),
        ("16 heads unrotated", 16, False),
        ("16 heads unrotated codes", 16, True),
    ):
        form = latent_codes(512, 64) if coded else None
        entry = _latent_entry(form, form.width if form else 576)
        rotation = None if "unrotated" in name else turns(32, "halves" not in name)
        constants = _latent_sizes(heads, 512, 64, norm(512), rotation) | entry
        warps, types = constants.pop("num_warps"), POINTERS | (CODES if coded else {})
        wide = (("LDG.128",),)
        yield KernelForm(
            f"place_latent_rows, {name}", place_latent_rows, types, constants, warps, demands=wide
        )
