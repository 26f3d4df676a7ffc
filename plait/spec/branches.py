"""Specs of what surrounds a mixer in its layer: streams, gains, means over depth, cycles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from plait.spec.model import Activation, HyperSpec, Mixer, NormSpec, ParallelSpec


@dataclass(frozen=True, slots=True)
class GatedNormSpec(NormSpec):
    """An RMS norm h with a gate of `rank` numbers: scale · h · sigmoid(widen(silu(narrow(h)))) (GigaChat)."""

    rank: int = 16
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerInputSpec(Mixer):
    """out(activation(gate(x)) · e): e is part `index` of the model's layer inputs (Gemma 4 E2B and E4B)."""

    index: int
    size: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class MemoryUnitSpec(Mixer):
    """A gated memory unit (Ren et al. 2025): out(silu(in(x)) · m), m of `size` numbers of the token from the
    scan of the mixer `source`."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class AltUpSpec(ParallelSpec):
    """A layer over `streams` of a token (AltUp; Gemma 3n): parts attn, ffn, and own, a `LayerInputSpec`.

    `rank`: of the path around attention (LAuReL). `norm`: of every norm in it; `norms` is not used.
    """

    streams: int = 4
    rank: int = 64
    norm: NormSpec = NormSpec()
    NORMS: ClassVar[tuple[str, ...]] = (
        *("router_norm", "attn.norm", "attn.post_norm", "ffn.norm", "ffn.post_norm", "own.post_norm"),
        "laurel.norm",
    )


@dataclass(frozen=True, slots=True)
class HyperBranchSpec(ParallelSpec):
    """A mixer, `inner`, that reads a sum of a token's streams, normed, and is added to each (`HyperSpec`)."""

    hyper: HyperSpec = field(default_factory=HyperSpec)
    norm: NormSpec = NormSpec()


@dataclass(frozen=True, slots=True)
class GatedBranchSpec(HyperBranchSpec):
    """The same, where the gated mean of normed streams is read (`HyperSpec.rank`; Qwen4-Exp)."""


@dataclass(frozen=True, slots=True)
class DepthSpec(ParallelSpec):
    """A mixer, `inner`, that reads a mean of what blocks of earlier layers gave and of this block so far, by
    attention over these sources (attention residuals; Kimi-K3). Without `inner` the mean itself is given.

    `sources`: blocks that have ended. `ends`: what was read last becomes one more of them, and the next one
    begins with what this gives (`BranchSpec.keep` 0). `norm`: of what `inner` reads; `eps`: of the sources.
    `of_normed`: the mean is of the sources as they are scored, normed; `reads`: how many such means `inner`
    reads, side by side, each with a norm of its own (Inkling 2).
    """

    sources: int = 0
    ends: bool = False
    norm: NormSpec | None = None
    eps: float = 1e-6
    of_normed: bool = False
    reads: int = 1


@dataclass(frozen=True, slots=True)
class MessageSpec(DepthSpec):
    """The same, in a later pass over layers that run several times (Inkling 2 Mini): gates of `rank` mix each
    mean with a message, a mean of what the `sent` blocks of the pass before gave.

    `messages`: how many there are, each of a learned query; `inner` reads as many inputs side by side.
    `restarts`: a pass begins here. Blocks from this one on become those that messages are of, and what is
    read is again what the first of them read. `gate_norm`: of what gates read.
    """

    messages: int = 1
    sent: int = 1
    rank: int = 64
    restarts: int | None = None
    gate_norm: NormSpec = NormSpec(weight=False)


@dataclass(frozen=True, slots=True)
class CycleSpec(Mixer):
    """In front of a stack of layers that runs in cycles with another one (HRM; Wang et al. 2025): what the
    last one gave, normed, becomes the state `after`, and the sum of both is read. None: embeddings are the
    slow state, a stored vector is the fast one. "alone": what was given, normed, is read (Nanbeige 4.2).
    "both": what was given, normed, becomes either state; both are read (Dory)."""

    after: Literal["slow", "fast", "both", "alone"] | None
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class SkipSpec(Mixer):
    """A connection over several layers (Solar Pro): `keeps` are the places in which what is read is kept for
    later layers; it is given on as it is, or, if `gives` is one of such places, what was kept there last."""

    keeps: tuple[int, ...] = ()
    gives: int | None = None


@dataclass(frozen=True, slots=True)
class ShortcutSpec(ParallelSpec):
    """One mixer, next to experts, `moe`, with outputs that wait: the next one without experts adds them
    (LongCat-Flash; Cai et al. 2024). `norms`: of what either reads (Arctic); `post_norms` are not used."""


@dataclass(frozen=True, slots=True)
class GainSpec(ParallelSpec):
    """One mixer, `inner`, with outputs times one learned number; without it, a token's embedding times that
    number (Talkie)."""


@dataclass(frozen=True, slots=True)
class GatedInputSpec(ParallelSpec):
    """One mixer, `inner`, that reads x · sigmoid(widen(silu(narrow(x)))), by `rank` numbers (A.X K2)."""

    rank: int = 16


@dataclass(frozen=True, slots=True)
class ScaledSpec(ParallelSpec):
    """x becomes a x + b + c inner(norm(x)) + d, with learned vectors (ZAYA); without `inner` a x + b.

    `post_norm`: of what `inner` gives (Dory).
    """

    norm: NormSpec | None = None
    post_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class ConvolvedSpec(ParallelSpec):
    """One mixer, `inner`, with outputs that are convolved over `taps` tokens (Inkling)."""

    taps: int = 4
