"""Specs of attention that reads some keys, chosen or compressed. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.spec.model import AttentionSpec, IndexerSpec, MlaSpec, NormSpec, Recurrent
from plait.spec.positions import RopeSpec


@dataclass(frozen=True, slots=True)
class BlockIndexSpec:
    """Which `top_k` blocks of `size` keys a key-value head attends to (MiniMax-M3): those with the largest
    q · k, by a small query of `dim` numbers for each. The last `local` blocks are always among them.

    `norm`: of these queries and keys.
    """

    dim: int = 128
    size: int = 128
    top_k: int = 16
    local: int = 1
    norm: NormSpec = NormSpec()
    rope: RopeSpec = field(default_factory=lambda: RopeSpec(64))


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """How `rate` tokens become one entry (DeepSeek-V4): by a softmax over them in each channel.

    `parts` 2: entries overlap, each is over its own window and the one before. `norm`, `rope`: of entries.
    `is_mean`: by their mean, and the first numbers of entries are rotated, not the last (Qwen4-Exp).
    `norms_tokens`: the norm is of what becomes entries, not of these (GLM-5.3). `has_bias`: logits have one
    for each place in the window. With a `rate` of 1 every token is an entry, and there are no logits.
    """

    rate: int
    parts: int
    norm: NormSpec
    rope: RopeSpec | None
    is_mean: bool = False
    norms_tokens: bool = False
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class EntryIndexSpec:
    """Which `top_k` entries a query attends to: as `IndexerSpec`, over compressed index keys of `dim`."""

    num_heads: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class BlockSparseSpec(AttentionSpec):
    """Attention over blocks of keys that small heads choose, for each key-value head its own (MiniMax-M3)."""

    indexer: BlockIndexSpec = field(default_factory=BlockIndexSpec)


@dataclass(frozen=True, slots=True)
class MeanIndexSpec:
    """Which `top_k` blocks of keys a query attends to (Qwen4-Exp): those with the largest Σ_h relu(q_h · k),
    k being the mean of a block's index keys. A block that has not ended is always read.

    `compressor`: how blocks become keys; queries have its norm and rope.
    """

    num_heads: int = 8
    dim: int = 128
    top_k: int = 16
    compressor: CompressorSpec = CompressorSpec(128, 1, NormSpec(), RopeSpec(64), is_mean=True)


@dataclass(frozen=True, slots=True)
class MeanSparseSpec(AttentionSpec, Recurrent):
    """Attention over blocks of keys that an indexer chooses, the same ones for all heads (Qwen4-Exp)."""

    indexer: MeanIndexSpec = field(default_factory=MeanIndexSpec)


@dataclass(frozen=True, slots=True)
class PooledMlaSpec(MlaSpec, Recurrent):
    """Latent attention of which the indexer chooses pools of keys; the open pool is its state (GLM-5.3)."""


@dataclass(frozen=True, slots=True)
class LearnedRopeSpec(RopeSpec):
    """Each frequency times e to a learned number, the same for all layers (LeRoPE; Mistral Large 4)."""


@dataclass(frozen=True, slots=True)
class GrownIndexerSpec(IndexerSpec):
    """Its queries are made of the hidden state, normed, and grow as those of `GrownMlaSpec`."""

    input_norm: NormSpec = NormSpec(1e-6, "layer")


@dataclass(frozen=True, slots=True)
class GrownMlaSpec(MlaSpec):
    """Latent attention with queries that grow with their position p: by a · ln(p + 1) + b, learned for each
    head (Mistral Large 4). `source`: the mixer of which latents are read; "": its own.
    """

    source: str = ""


@dataclass(frozen=True, slots=True)
class CompressedSpec(Recurrent):
    """Attention over the last `window` keys and over compressed ones of all before (DeepSeek-V4).

    A key of `head_dim` numbers serves all heads, and is their value. Its last numbers are rotated, and
    those of outputs are rotated back. Outputs go through `groups` linear layers to `out_rank`
    numbers each. `norm`: of keys and of the queries' latent. Without an `indexer` a query sees all compressed
    keys, without a `compressor` there are none.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    scale: float
    window: int
    rope: RopeSpec
    norm: NormSpec
    groups: int
    out_rank: int
    compressor: CompressorSpec | None = None
    indexer: EntryIndexSpec | None = None


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """The `count` blocks of `size` entries of which later layers choose theirs: those with the largest score.

    `source`: the mixer that chooses these blocks; "": this one.
    """

    count: int
    size: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class SharedCompressedSpec(CompressedSpec):
    """The same, where layers share entries, and what is chosen of them (DeepSeek-V4.1).

    `source`: the mixer that makes entries and their index keys, `chooser`: the one that chooses; "": this
    one. Index keys are made of entries, before these are rotated. Heads have no norm. `compressor` None:
    there are no entries, and the `indexer` of every other layer is that of its chooser.
    """

    source: str = ""
    chooser: str = ""
    candidates: CandidateSpec | None = None
