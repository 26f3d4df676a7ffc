"""What mixers are made with: a batch as tensors, embedding and head, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.model.layers.norm_gate import NormGate
from plait.ops import norm
from plait.ops.activation import activate, combine, multiply, rescale
from plait.ops.linear import Linear
from plait.ops.low_rank import AdapterRows
from plait.ops.place import NormWeights, Rotation
from plait.ops.ranks import Comm, gather_columns
from plait.ops.rope import frequencies, rotate
from plait.ops.rows import bind_table
from plait.spec.branches import GatedNormSpec
from plait.spec.model import HeadSpec, ModelSpec, NormSpec
from plait.spec.positions import RopeSpec
from plait.spec.sparse import LearnedRopeSpec

EMBEDDINGS = "embeddings"  # in `Batch.step`, for mixers that add them


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """Where one block group's tokens live. Token t of sequence s is at row t % block_size of block
    `block_table[s, t // block_size]`; `slot_mapping` is that address, flat, for each new token."""

    block_table: Tensor  # [S, M] int64, padded with 0 (the garbage block)
    slot_mapping: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class CanvasRows:
    """Which rows of a batch are places of noisy canvases: the last ones of their sequences."""

    start: Tensor  # [S] int64: the position where the canvas of each sequence begins; its length: it has none
    is_place: Tensor  # [T] bool
    is_fresh: Tensor  # [L] bool: of each row of logits, whether this is the first pass of its canvas
    sizes: tuple[int, ...]  # of each canvas
    temperatures: Tensor  # float32: of this pass, for each canvas

    def list_temperatures(self) -> Tensor:
        """The temperature of each row of logits, [L]."""
        parts = zip(self.temperatures.unbind(), self.sizes, strict=True)
        return torch.cat([one.expand(size) for one, size in parts])


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch: decodes first (one token each), then chunks of prompts.

    The same object in eager runs and in replays of a captured step; passed as an argument, never looked up.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [S+1] int64: sequence s owns rows query_start[s]..query_start[s+1]
    seq_lens: Tensor  # [S] int64: tokens in the sequence after this pass
    num_decodes: int
    paged: Mapping[str, PagedIndex]  # by block group name
    state_slots: Tensor  # [S] int64
    has_history: Tensor  # [S] bool: False where this pass holds the sequence's first token
    logit_rows: Tensor  # [L] int64: the rows of which logits are needed
    adapters: AdapterRows | None = None  # which adapter each token has; None: there are none
    prompts: Tensor | None = None  # [S] int64: tokens of each prompt, where a pass has whole sequences
    canvas: CanvasRows | None = None  # None: there is no noisy canvas
    # What a layer's kernels leave for those of the layers behind it: the decoder starts each pass without.
    step: dict[object, Any] = field(default_factory=dict, compare=False)

    def count_prompts(self) -> Tensor:
        """Tokens of each prompt, [S]: 0 of a text that is read alone."""
        return torch.zeros_like(self.seq_lens) if self.prompts is None else self.prompts


class Embedding:
    """A table of token vectors, read row by row from the weight's own storage.

    Learned positions, where a model has them, are a second table; a norm may follow.
    """

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        table = w.weight("weight", (s.vocab_size, s.hidden_size))
        self.scale, self.dtype = s.embed_scale, w.target.dtype
        self._embed, self.table = bind_table(w.bind, table)
        self._combine = w.bind(combine) if s.positions else None
        if s.positions:
            places = w.weight("positions.weight", (s.positions, s.hidden_size))
            self._place, self.places = bind_table(w.bind, places)
        self.norm = Norm(s.embed_norm, w.scope("norm"), s.hidden_size) if s.embed_norm else None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions: [T] -> [T, hidden]."""
        x = self._embed(token_ids, self.table, self.scale, self.dtype)
        if self._combine:
            x = self._combine(x, self._place(positions, self.places, 1.0, self.dtype), 1.0)
        return self.norm(x) if self.norm else x


class LmHead:
    """Hidden states to logits, in float32. A tied model reads the embedding's table.

    Each rank computes the logits of some tokens, and has those of all.
    """

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        self.spec, self._comm = s, w.target.comm
        name, rank = "embed" if s.tied else "head", self._comm.rank
        edges = [s.vocab_size * i // rank.size for i in range(rank.size + 1)]
        self._widths = [stop - start for start, stop in pairwise(edges)]
        rows = (edges[rank.index], edges[rank.index + 1]) if rank.size > 1 else None
        sizes = (s.vocab_size,)
        self.linear: Linear = w.linear(name, in_size=s.hidden_size, out_sizes=sizes, rows=rows)
        self._rescale = w.bind(rescale)
        self._turn = HeadTransform(s.head, w.scope("head.transform"), s.hidden_size) if s.head else None

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x: [L, hidden], tokens: [L] int64, which of the step these are -> [L, vocab] float32.

        None: there are no adapters, which choose by token.
        """
        x = self._turn(x) if self._turn else x
        logits = gather_columns(self._comm, self.linear(x, tokens).float(), self._widths)
        scale, cap = self.spec.logit_scale, self.spec.logit_softcap
        return logits if scale == 1.0 and not cap else self._rescale(logits, scale, cap)


class HeadTransform:
    """What some heads do before their table of logits: norm(activation(linear(x))), whole on every rank."""

    def __init__(self, s: HeadSpec, w: Weights, hidden: int) -> None:
        self.spec, self.norm = s, Norm(s.norm, w.scope("norm"), hidden)
        self.linear: Linear = w.linear("linear", in_size=hidden, out_sizes=(hidden,))
        self._activate = w.bind(activate, kind=s.activation, gated=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [L, hidden] -> its like."""
        return self.norm(self._activate(self.linear(x), self.spec.activation, False))


class Norm:
    """RMS or layer norm over `size` features, or over each of `groups` equal parts of them.

    To length 1 (`kind` "length") it is an RMS norm with n**-0.5 as a factor of its weight, eps divided by n.
    `is_same`: an RMS norm of which the groups have one weight.
    """

    def __init__(self, s: NormSpec, w: Weights, size: int, groups: int = 1, *, is_same: bool = False) -> None:
        self.spec, self.groups, many = s, groups * s.groups, groups if is_same else 1
        # In float32 whatever the model computes in: Gemma's 1 + w would lose its last bits in bfloat16.
        own = w.tensor("weight", (size // many,), torch.float32) if s.weight else _ones(size // many, w)
        self.weight, self.eps = own.repeat(many) if is_same else own, s.eps
        if s.kind == "length":
            count = size // self.groups
            self.weight, self.eps = self.weight * count**-0.5, s.eps / count
        self._gate = None
        if isinstance(s, GatedNormSpec):
            self.weight, self._gate = self.weight * s.scale, NormGate(s, w, size)
        self._before = self.weight if s.kind == "scaled" else None
        if self._before is not None:
            self.weight = _ones(size, w)
        # An RMS norm has no bias, a norm without a weight neither: one in the file is left over, and refused.
        self.bias = w.optional("bias", (size,), torch.float32) if s.kind == "layer" and s.weight else None
        self._rms = w.bind(norm.rms_norm, size=size)
        self._add_rms = w.bind(norm.add_rms_norm, size=size)
        self._combine, self._multiply = w.bind(combine), w.bind(multiply)
        self._layer = w.bind(norm.layer_norm, size=size) if s.kind == "layer" else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size], of a scaled or gated norm [T, size] -> the same shape."""
        if self._layer:
            return self._layer(x, self.weight, self.bias, self.eps, self.groups)  # type: ignore[no-any-return]
        x = x if self._before is None else self._multiply(x, self._before.expand(x.shape))
        h: Tensor = self._rms(x, self.weight, self.eps, self.groups)
        return self._gate(h) if self._gate else h

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMS norm over all features that does nothing more."""
        return self._layer is None and self._before is None and self._gate is None and self.groups == 1

    @property
    def weights(self) -> NormWeights:
        """For ops that norm and do more. Raises UnsupportedModel for a norm that does more by itself."""
        if self._before is not None or self._gate:
            raise UnsupportedModel("a norm that scales before it norms, or gates, is not implemented here")
        return NormWeights(self.weight, self.bias, self.eps, self.spec.kind == "layer")

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the step from one branch to the next, one fused op where a kernel has it."""
        if delta is None:
            return x, self(x)
        if self._layer or self._before is not None or self.groups > 1:
            x = self._combine(x, delta, 1.0)
            return x, self(x)
        x, h = self._add_rms(x, delta, self.weight, self.eps)
        return x, self._gate(h) if self._gate else h


class GatedNorm:
    """Mamba's gated norm over `groups` equal parts of all heads' outputs, of which this rank has `size`.

    Without a norm it only gates. Where a part is on several ranks, its outputs are gathered: each rank then
    norms all of it with the same kernel as one rank alone.
    """

    def __init__(
        self, s: NormSpec | None, w: Weights, size: int, groups: int, norm_before_gate: bool = False
    ) -> None:
        self._comm, self._size, ranks = w.target.comm, size, w.target.comm.rank.size
        self._is_gathered = s is not None and groups % ranks != 0
        self.weight = None
        if s is not None:
            self.weight = w.tensor("gated_norm.weight", (size * ranks,))
            if not self._is_gathered:
                self.weight, groups = own_part(self._comm, self.weight, size), groups // ranks
        self._how = (s.eps if s else 0.0, groups, norm_before_gate)
        width = size * ranks if self._is_gathered else size
        self._apply = w.bind(norm.gated_rms_norm, size=width, groups=groups)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [T, size] -> [T, size]."""
        if not self._is_gathered:
            return self._apply(x, gate, self.weight, *self._how)  # type: ignore[no-any-return]
        widths = [self._size] * self._comm.rank.size
        whole = (gather_columns(self._comm, part, widths) for part in (x, gate))
        return own_part(self._comm, self._apply(*whole, self.weight, *self._how), self._size)


def own_part(comm: Comm, x: Tensor, size: int) -> Tensor:
    """This rank's `size` columns of what all ranks have: [..., size · ranks] -> [..., size]."""
    start = size * comm.rank.index
    return x if comm.rank.size == 1 else x[..., start : start + size].contiguous()


def _ones(size: int, w: Weights) -> Tensor:
    """The weight of a norm that has none: what is multiplied by 1 keeps its bits."""
    return torch.ones(size, device=w.target.device)


def make_rotation(s: RopeSpec, w: Weights) -> Rotation:
    """The frequencies of rotary positions, on the target's device."""
    inv_freq, mscale = frequencies(s, w.target.max_len)
    inv_freq = inv_freq.to(w.target.device)
    if isinstance(s, LearnedRopeSpec):
        sizes = (len(inv_freq),)
        inv_freq = inv_freq * w.shared("rope", lambda root: root.tensor("alpha", sizes, torch.float32).exp())
    return Rotation(inv_freq, mscale, s.interleaved)


class Rope:
    def __init__(self, s: RopeSpec, w: Weights) -> None:
        self.rotation = make_rotation(s, w)
        self._rotate = w.bind(rotate, dim=s.dim, interleaved=s.interleaved, max_len=w.target.max_len)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, d], positions: [T] -> like x."""
        return self.rotation.apply(self._rotate, x, positions)


def describe_rope(s: RopeSpec | None) -> str:
    """Rotary positions in a few words, for `plait info`."""
    if s is None:
        return "no rope"
    kind = s.scaling.get("rope_type", "")
    scaled = f" {kind}" if kind not in ("", "default") else ""
    scaled += " learned" if isinstance(s, LearnedRopeSpec) else ""
    return f"rope {s.theta:g}{scaled} on {s.dim}"
