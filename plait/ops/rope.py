"""Rotary positions: the frequencies of every known scaling, and the rotation.

Two kinds change with the length of the sequence in other engines (dynamic, longrope), which would make cached
keys wrong; here they are fixed by the longest sequence the engine is configured for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, cast

import torch
from torch import Tensor

from plait.errors import UnsupportedModel
from plait.ops.case import Case
from plait.ops.registry import Arguments, op
from plait.spec.model import ModelSpec
from plait.spec.positions import RopeSpec

Scaled = tuple[Tensor, float]


class Scaling(TypedDict, total=False):
    """A scaling's parameters, by the keys of configs; each kind says which it needs."""

    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    divisors: Sequence[float]
    factor: float
    high_freq_factor: float
    long_factor: Sequence[float]
    long_mscale: float
    low_freq_factor: float
    max_position_embeddings: int
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int
    share: float
    short_factor: Sequence[float]
    short_mscale: float
    truncate: bool


def frequencies(rope: RopeSpec, max_len: int) -> Scaled:
    """Inverse frequencies [dim/2] float32, and the factor that cos and sin are multiplied by.

    max_len: the longest sequence, in tokens. Raises UnsupportedModel for a rope_type that is not known.
    """
    kind = rope.scaling.get("rope_type", "default")
    if kind not in KNOWN_KINDS:
        raise UnsupportedModel(f"rope_type {kind!r} is not known; known: {', '.join(sorted(KNOWN_KINDS))}")
    try:
        return _KINDS[kind](rope, cast(Scaling, rope.scaling), max_len)
    except KeyError as missing:
        raise UnsupportedModel(f"rope_type {kind!r} needs the key {missing} in the config") from None


def rope_notes(spec: ModelSpec, max_len: int) -> list[str]:
    """What a reader must know of the rotary positions of a model for sequences of up to `max_len` tokens."""
    mixers = [getattr(mixer, "rope", None) for _, mixer in spec.mixers()]
    asides = [branch.aside.rope for _, branch in spec.branches() if branch.aside]
    notes = [_length_note(rope, max_len) for rope in (*mixers, *asides) if rope is not None]
    return list(dict.fromkeys(note for note in notes if note))


def _length_note(rope: RopeSpec, max_len: int) -> str | None:
    """Which factors a sequence of up to `max_len` tokens gets, where a scaling has more than one choice.

    Published code changes them when a sequence passes the original length: cached keys would be wrong.
    """
    kind, original = rope.scaling.get("rope_type"), rope.scaling.get("original_max_position_embeddings")
    if kind not in ("longrope", "dynamic") or original is None:
        return None
    if kind == "dynamic":
        return f"rope: dynamic scaling for {max(max_len, original)} tokens, at every length of a sequence"
    if max_len <= original:
        return f"rope: the short factors of longrope, because no sequence passes {original} tokens"
    return (
        f"rope: the long factors of longrope at every length, because a sequence may pass {original} tokens; "
        f"--max-model-len {original} takes the short ones"
    )


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(rope: RopeSpec, _: Scaling, __: int) -> Scaled:
    return _plain(rope.dim, rope.theta), 1.0


def _linear(rope: RopeSpec, p: Scaling, _: int) -> Scaled:
    return _plain(rope.dim, rope.theta) / p["factor"], 1.0


def _dynamic(rope: RopeSpec, p: Scaling, max_len: int) -> Scaled:
    """NTK-aware scaling (Peng et al. 2023, section 3.1), at the longest length, not the current."""
    original = p["original_max_position_embeddings"]
    length = max(max_len, original)
    factor = p["factor"]
    stretch = (factor * length / original - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    return _plain(rope.dim, rope.theta * stretch), 1.0


def _llama3(rope: RopeSpec, p: Scaling, _: int) -> Scaled:
    inv = _plain(rope.dim, rope.theta)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    turns = p["original_max_position_embeddings"] * inv / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return inv * smooth + inv / p["factor"] * (1 - smooth), 1.0


def _yarn(rope: RopeSpec, p: Scaling, _: int) -> Scaled:
    """Peng et al. 2023: slow dimensions are interpolated, fast ones kept, a ramp between."""
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or p["max_position_embeddings"] / original

    def dim_of(turns: float) -> float:
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(p.get("beta_fast") or 32), dim_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - low) / (high - low if high != low else 1e-3)
    keep = 1 - ramp.clamp(0, 1)
    inv = _plain(rope.dim, rope.theta)
    return inv * keep + inv / factor * (1 - keep), _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Scaling, factor: float) -> float:
    if (given := p.get("attention_factor")) is not None:
        return float(given)
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much YaRN sharpens attention for a stretch of `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: RopeSpec, p: Scaling, max_len: int) -> Scaled:
    """Ding et al. 2024: a divisor per dimension; the long list if the engine may pass the original length."""
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or p["max_position_embeddings"] / original
    is_long, usual = max_len > original, p.get("attention_factor")
    divisors = torch.tensor(p["long_factor"] if is_long else p["short_factor"]).float()
    scale = p.get("long_mscale", usual) if is_long else p.get("short_mscale", usual)  # PhiMoE has both
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _plain(rope.dim, rope.theta) / divisors, float(scale)


def _divisors(rope: RopeSpec, p: Scaling, _: int) -> Scaled:
    """GGUF's `rope_freqs`: one divisor per frequency, computed by the program that wrote the file."""
    return _plain(rope.dim, rope.theta) / torch.tensor(p["divisors"]).float(), 1.0


def _proportional(rope: RopeSpec, p: Scaling, _: int) -> Scaled:
    """Gemma 4: the first pairs of a head turn as they would in a whole one, the others do not."""
    inv, turned = _plain(rope.dim, rope.theta), int(p["share"] * rope.dim // 2)
    return torch.where(torch.arange(len(inv)) < turned, inv, 0.0) / (p.get("factor") or 1.0), 1.0


_KINDS: Mapping[str, Callable[[RopeSpec, Scaling, int], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "divisors": _divisors,
    "proportional": _proportional,
}
KNOWN_KINDS = frozenset(_KINDS)

CASES: list[Case] = [
    dict(tokens=1, heads=4, head_dim=64, rotated=64, interleaved=False),
    dict(tokens=33, heads=3, head_dim=80, rotated=32, interleaved=True),
    dict(tokens=5, heads=2, head_dim=24, rotated=12, interleaved=False),
    dict(tokens=2, heads=2, head_dim=50, rotated=50, interleaved=True),
]


@op(cases=CASES)
def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, mscale: float, interleaved: bool) -> Tensor:
    """Rotate the first 2·len(inv_freq) of each head. x: [T, heads, d], positions: [T] -> like x.

    In float32 whatever x's dtype, as OLMo 2 and Command R need it; for others it is merely closer.
    """
    width = 2 * inv_freq.shape[0]
    angle = positions[:, None, None].float() * inv_freq
    cos, sin = angle.cos() * mscale, angle.sin() * mscale
    turned, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@rotate.inputs
def _rotate_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["heads"], case["head_dim"], dtype=dtype, device=device)
    positions = torch.randint(0, 500, (case["tokens"],), device=device)
    return (x, positions, _plain(case["rotated"], 1e4).to(device), 1.0, case["interleaved"]), {}
