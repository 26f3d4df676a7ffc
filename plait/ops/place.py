"""What is between the projections of attention and attention itself: norms, rotation, and the store.

Fused ops of GPUs, where each launch counts. On a CPU mixers call the ops that these replace, because a cache
there has a layout that only the kernel of attention knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plait.ops.attention import write_paged
from plait.ops.case import Case
from plait.ops.entry import head_forms, head_widths, latent_form, latent_width, stored_dtype
from plait.ops.norm import layer_norm, rms_norm
from plait.ops.registry import Arguments, TensorFn, op
from plait.ops.rope import rotate
from plait.ops.rows import join


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm with its weights, [n] float32."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_layer: bool

    def apply(self, rms: TensorFn, layer: TensorFn, x: Tensor, groups: int = 1) -> Tensor:
        """x: [..., n] -> its norm, over each of `groups` equal parts."""
        if self.is_layer:
            return layer(x, self.weight, self.bias, self.eps, groups)
        return rms(x, self.weight, self.eps, groups)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Norms of queries and keys: of each head with one weight for all ("head"), of each with its own
    ("each"), or of all heads as one vector ("all")."""

    q: NormWeights
    k: NormWeights
    over: Literal["head", "each", "all"]

    def apply(self, norm: NormWeights, rms: TensorFn, layer: TensorFn, x: Tensor) -> Tensor:
        """x: [T, heads, d] -> its norm."""
        if self.over == "head":
            return norm.apply(rms, layer, x)
        return norm.apply(rms, layer, x.flatten(1), x.shape[1] if self.over == "each" else 1).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary positions of one kind: see `ops.rope.rotate`."""

    inv_freq: Tensor  # [pairs] float32
    mscale: float
    interleaved: bool

    def apply(self, turn: TensorFn, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, d], positions: [T] -> like x."""
        return turn(x, positions, self.inv_freq, self.mscale, self.interleaved)


HEAD_CASES: list[Case] = [
    dict(tokens=1, heads=4, kv_heads=2, dim=16, pairs=8, over="head"),
    dict(tokens=5, heads=6, kv_heads=3, dim=24, pairs=0, over="all"),
    dict(tokens=3, heads=9, kv_heads=3, dim=64, pairs=32, over=None),
    dict(tokens=3, heads=6, kv_heads=2, dim=40, pairs=8, over="each", is_layer=True, interleaved=True),
    dict(tokens=2, heads=3, kv_heads=1, dim=20, pairs=10, over="all", kv_dtype="bfloat16"),
    dict(tokens=4, heads=4, kv_heads=4, dim=40, pairs=20, over="head", kv_dtype="int8"),
    dict(tokens=2, heads=2, kv_heads=2, dim=16, pairs=0, over=None),
    dict(tokens=3, heads=5, kv_heads=1, dim=20, v_dim=36, pairs=6, over=None),
]
ROWS = 48  # of the caches of test cases


def _place_heads(
    rms: TensorFn,
    layer: TensorFn,
    turn: TensorFn,
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
    if norms:
        q, k = norms.apply(norms.q, rms, layer, q), norms.apply(norms.k, rms, layer, k)
    if rotation:
        q, k = rotation.apply(turn, q, positions), rotation.apply(turn, k, positions)
    for cache, new, form in zip(
        (k_cache, v_cache), (k, v), head_forms(k.shape[-1], k_cache.dtype), strict=True
    ):
        write_paged(cache, new, slot_mapping, form)
    return q


@op(cases=HEAD_CASES, private=("k_cache", "v_cache"))
def place_heads(
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
    """Norm and rotate queries and keys, and store keys and values, which `paged_attention` then finds.

    q: [T, heads, d], k, v: [T, kv_heads, d], caches and slot_mapping: as in `paged_attention`, positions: [T]
    -> queries [T, heads, d]. Values may be wider than keys, as `front_attention` has them.
    """
    parts = rms_norm.reference, layer_norm.reference, rotate.reference
    return _place_heads(*parts, q, k, v, k_cache, v_cache, slot_mapping, positions, norms, rotation)


place_heads.replaces(rms_norm, layer_norm, rotate)(_place_heads)


def _random_norm(size: int, device: str, is_layer: bool = False) -> NormWeights:
    bias = torch.randn(size, device=device) if is_layer else None
    return NormWeights(torch.randn(size, device=device), bias, 1e-6, is_layer)


def _random_rotation(pairs: int, is_interleaved: bool, device: str) -> Rotation:
    return Rotation(1.0 / 1e4 ** (torch.arange(pairs, device=device) / pairs), 1.25, is_interleaved)


def _cache(case: Case, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    kept = stored_dtype(case["kv_dtype"]) if "kv_dtype" in case else dtype
    return torch.zeros(shape, dtype=kept, device=device)


@place_heads.inputs
def _heads_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, heads, kv, d = (case[name] for name in ("tokens", "heads", "kv_heads", "dim"))
    wide = torch.randn(tokens, heads + 2 * kv, d, dtype=dtype, device=device)
    q, k, v = wide.split([heads, kv, kv], 1)
    shapes = [(3, ROWS // 3, kv, width) for width in head_widths(d, case.get("kv_dtype", ""))]
    if size := case.get("v_dim"):
        v, shapes[1] = torch.randn(tokens, kv, size, dtype=dtype, device=device), (3, ROWS // 3, kv, size)
    slots = torch.randperm(ROWS, device=device)[:tokens]
    norms, over, is_layer = None, case["over"], case.get("is_layer", False)
    if over:
        sizes = (d, d) if over == "head" else (heads * d, kv * d)
        q_norm, k_norm = (_random_norm(size, device, is_layer) for size in sizes)
        norms = HeadNorms(q_norm, k_norm, over)
    turned = case.get("interleaved", False)
    rotation = _random_rotation(case["pairs"], turned, device) if case["pairs"] else None
    positions = torch.randint(0, 500, (tokens,), device=device)
    caches = [_cache(case, shape, dtype, device) for shape in shapes]
    return (q, k, v, *caches, slots, positions, norms, rotation), {}


LATENT_CASES: list[Case] = [
    dict(tokens=1, heads=4, kv_rank=16, rope_dim=4, interleaved=True),
    dict(tokens=5, heads=3, kv_rank=40, rope_dim=8),
    dict(tokens=3, heads=6, kv_rank=64, rope_dim=32, is_layer=True),
    dict(tokens=2, heads=5, kv_rank=24, rope_dim=6, kv_dtype="bfloat16", rotates=False),
    dict(tokens=3, heads=16, kv_rank=160, rope_dim=32, kv_dtype="int8", has_norm=False),
]


def _place_latent(
    rms: TensorFn,
    layer: TensorFn,
    turn: TensorFn,
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
    latent = norm.apply(rms, layer, latent) if norm else latent
    if rotation:
        q_rope = rotation.apply(turn, q_rope, positions)
        k_rope = rotation.apply(turn, k_rope[:, None], positions)[:, 0]
    form = latent_form(latent.shape[-1], k_rope.shape[-1], cache.dtype)
    write_paged(cache, torch.cat([latent, k_rope], -1), slot_mapping, form)
    return torch.cat([q, q_rope], -1)


@op(cases=LATENT_CASES, private=("cache",))
def place_latent(
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
    """Norm the latent, rotate the shared key and the queries' part of it, store both, and join the queries.

    q: [T, heads, kv_rank] (through the key up-projection), q_rope: [T, heads, rope_dim], latent:
    [T, kv_rank], k_rope: [T, rope_dim], cache and slot_mapping: as in `paged_latent_attention`, positions:
    [T] -> queries [T, heads, kv_rank + rope_dim].
    """
    parts = rms_norm.reference, layer_norm.reference, rotate.reference
    return _place_latent(*parts, q, q_rope, latent, k_rope, cache, slot_mapping, positions, norm, rotation)


place_latent.replaces(rms_norm, layer_norm, rotate)(_place_latent)


@place_latent.inputs
def _latent_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, heads, rank, rope = (case[name] for name in ("tokens", "heads", "kv_rank", "rope_dim"))
    q, q_rope = (torch.randn(tokens, heads, n, dtype=dtype, device=device) for n in (rank, rope))
    latents = torch.randn(tokens, rank + rope, dtype=dtype, device=device).split([rank, rope], -1)
    width = latent_width(rank, rope, case.get("kv_dtype", ""))
    norm = _random_norm(rank, device, case.get("is_layer", False)) if case.get("has_norm", True) else None
    turns = _random_rotation(rope // 2, case.get("interleaved", False), device)
    rotation = turns if case.get("rotates", True) else None
    slots = torch.randperm(ROWS, device=device)[:tokens]
    positions = torch.randint(0, 500, (tokens,), device=device)
    cache = _cache(case, (3, ROWS // 3, width), dtype, device)
    return (q, q_rope, *latents, cache, slots, positions, norm, rotation), {}


TURN_CASES: list[Case] = [
    dict(tokens=1, heads=4, dim=24, pairs=4, is_last=True, has_norm=False, interleaved=True),
    dict(tokens=5, heads=9, dim=40, pairs=8, is_last=True),
    dict(tokens=3, heads=3, dim=20, pairs=6, is_layer=True, interleaved=True),
    dict(tokens=2, heads=2, dim=16, pairs=8),
]


@op(cases=TURN_CASES)
def turn_heads(
    x: Tensor, positions: Tensor, norm: NormWeights | None, rotation: Rotation, is_last: bool
) -> Tensor:
    """Norm each head, then rotate its last numbers, or its first ones. x: [T, heads, d], positions: [T] ->
    like x."""
    parts = rms_norm.reference, layer_norm.reference, rotate.reference, join.reference
    return _turn_heads(*parts, x, positions, norm, rotation, is_last)


@turn_heads.replaces(rms_norm, layer_norm, rotate, join, is_default=True)
def _turn_heads(
    rms: TensorFn,
    layer: TensorFn,
    turn: TensorFn,
    put: TensorFn,
    x: Tensor,
    positions: Tensor,
    norm: NormWeights | None,
    rotation: Rotation,
    is_last: bool,
) -> Tensor:
    x = norm.apply(rms, layer, x) if norm else x
    still = x.shape[-1] - 2 * len(rotation.inv_freq)
    if not is_last or not still:
        return rotation.apply(turn, x, positions)
    return put(x[..., :still], rotation.apply(turn, x[..., still:], positions))


@turn_heads.inputs
def _turn_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, heads, dim = (case[name] for name in ("tokens", "heads", "dim"))
    x = torch.randn(tokens, 2 * heads, dim, dtype=dtype, device=device)[:, heads:]
    norm = _random_norm(dim, device, case.get("is_layer", False)) if case.get("has_norm", True) else None
    rotation = _random_rotation(case["pairs"], case.get("interleaved", False), device)
    positions = torch.randint(0, 500, (tokens,), device=device)
    return (x, positions, norm, rotation, case.get("is_last", False)), {}


COMPRESSED_CASES: list[Case] = [
    dict(tokens=1, heads=4, dim=24, pairs=4, rate=1, step=1),
    dict(tokens=9, heads=5, dim=40, pairs=8, rate=4, step=2, interleaved=True),
    dict(tokens=3, heads=2, dim=20, pairs=2, rate=2, step=1, kv_dtype="bfloat16"),
    dict(tokens=2, heads=3, dim=16, pairs=4, rate=0, step=1),
    dict(tokens=5, heads=3, dim=16, pairs=4, rate=1, step=1, interleaved=True, has_norm=False),
]


@op(cases=COMPRESSED_CASES)
def place_compressed(
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
    """`turn_heads` of queries, latents and entries, of which the last numbers rotate, and the store of both.

    q: [T, heads, d], latent, entries: [T, d], caches: as in `ops.compressed.entry_attention`, which finds
    both then, slots: (of latents, of entries), firsts: [T], the positions of entries, norms: of queries, if
    these have one, of latents, of entries -> queries [T, heads, d]. `rate` 0: there are no entries.
    """
    given = (q, latent, entries, cache, packed, slots, positions, firsts, norms, rotation, rate, step)
    found: Tensor = _place_compressed(turn_heads.reference, *given)
    return found


@place_compressed.replaces(turn_heads)
def _place_compressed(
    turn: TensorFn,
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
    latent = turn(latent[:, None], positions, norms[1], rotation, True)[:, 0]
    write_paged(cache, latent, slots[0])
    if entries is not None and packed is not None:
        made = turn(entries[:, None], firsts, norms[2], rotation, True)[:, 0]
        ends = (positions + 1) % rate == 0
        packed.view(-1, packed.shape[-1])[slots[1][ends] // step] = made[ends].to(packed.dtype)
    return turn(q, positions, norms[0], rotation, True)


@place_compressed.inputs
def _entry_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, heads, dim, rate, step = (case[name] for name in ("tokens", "heads", "dim", "rate", "step"))
    q = torch.randn(tokens, heads, dim, dtype=dtype, device=device)
    latent, entries = torch.randn(tokens, 2 * dim, dtype=dtype, device=device).split(dim, -1)
    cache, packed = (_cache(case, (3, ROWS // 3 // n, dim), dtype, device) for n in (1, step))
    places = torch.randperm(ROWS // step, device=device)[:tokens] * step + step - 1
    positions = torch.randint(0, 500, (), device=device) + torch.arange(tokens, device=device)
    q_norm, *others = (_random_norm(dim, device) for _ in range(3))
    norms = (q_norm if case.get("has_norm", True) else None, *others)
    rotation = _random_rotation(case["pairs"], case.get("interleaved", False), device)
    known = (entries, positions // rate * rate) if rate else (None, None)
    given = (q, latent, known[0], cache, packed if rate else None, (places.flip(0), places))
    return (*given, positions, known[1], norms, rotation, rate, step), {}
