"""Modules pull what they need by our names; nothing stays unused, nothing is missing silently.

A linear layer has a bias if and only if the checkpoint has one for it. So there is one flag less per
projection, and the unused-tensor check keeps it honest.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.divided import (
    WHOLE,
    Cuts,
    FactorPart,
    StoredPart,
    divide_linear,
    keep_joined,
    list_dropped,
)
from plait.checkpoint.names import NameMap, UnknownName, make_derived, sources_of
from plait.checkpoint.packed_cache.cache import Shelf
from plait.checkpoint.storages import Checkpoint, list_storages
from plait.errors import MissingTensor, ShapeMismatch, UnusedTensor, list_some
from plait.ops.chip import Chip
from plait.ops.expert_stack import ExpertStack, Pack
from plait.ops.linear import Activations, Linear
from plait.ops.ranks import Comm
from plait.ops.registry import Binding, Op, OpFacts
from plait.partition import Cut, Range
from plait.quant.encode import find_encoder, log_encoded
from plait.quant.weight import CachedWeight, Dense, Weight, as_tensor, as_weight
from plait.spec.recurrent import MergedIdsSpec

PLAIN = {"router", "shared_gate"}  # small weight matrices that choose: they are never encoded


class WeightFeed(Protocol):
    """Parts of a checkpoint's tensors that were read ahead, on the target's device."""

    def has(self, name: str, part: StoredPart) -> bool: ...
    def take(self, name: str, part: StoredPart) -> Weight | Tensor: ...


@dataclass(slots=True)
class Target:
    """Where and how a model is built (device, compute dtype, its two sizes, ops) and what was bound."""

    device: torch.device
    dtype: torch.dtype
    max_len: int
    hidden_size: int
    ops: str = "auto"
    bound: list[Binding] = field(default_factory=list)
    on_read: Callable[[str, int], None] | None = None  # progress: (their name, bytes)
    executor: Any = None  # of native kernels (`kernels.cpu`), if there is one
    graphs: Any = None  # what captures the steps of a GPU (`runner.device.graph_backends`), if it is one
    chip: Chip | None = None  # the GPU, if it is one
    pdl: bool = True  # its kernels may begin before those before them have ended, if the trial is right
    activations: Activations = "float32"  # what inputs of layers in block formats are rounded to
    kv_dtype: str = "model"  # of keys, values and latents
    state_dtype: str = "float32"  # of recurrent state
    deterministic: bool = False  # prompts in the arithmetic of decodes
    block_size: int = 16  # tokens in a block of paged state
    quantize: str | None = None  # the block format that plain weights of linear layers are encoded in
    encoded: Counter[str] = field(default_factory=Counter)  # how many linear weights were kept in what
    weights_nbytes: int = 0  # what the model keeps in memory, in the form it keeps it
    shelf: Shelf | None = None  # what was packed at an earlier startup
    feed: WeightFeed | None = None  # gives what is read as it is stored, while a model is built for a GPU
    no_fuse: tuple[str, ...] = ()  # fused ops that are left out: their compositions run
    cuts: Cuts = field(default_factory=Cuts)  # this rank's part, where ranks share the model
    adapters: AdapterSlots | None = None  # of LoRA, if the model may have some
    ranks: Any = None  # of rank 0: the other ranks (`runner.ranks.group`), if there are any
    merge_ids: Callable[[MergedIdsSpec], Tensor] | None = None  # the tokenizer's table of merged ids
    drafts: Target | None = None  # what its head for drafts, or a draft model, was built for, if any

    @property
    def comm(self) -> Comm:
        """This rank, and how it reaches the others."""
        return self.cuts.comm

    @property
    def platform(self) -> str:
        """What variants are chosen for: of an example of a GPU, which has its tensors on the CPU, a GPU."""
        return "cuda" if self.chip else self.device.type


class Weights:
    """A view of a checkpoint under one prefix of our names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: NameMap,
        target: Target,
        prefix: str = "",
        used: set[str] | None = None,
        made: dict[str, object] | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        self.checkpoint, self.names, self.target, self.prefix = checkpoint, names, target, prefix
        self.cuts = target.cuts if cuts is None else cuts
        self._used: set[str] = set() if used is None else used
        self._made: dict[str, object] = {} if made is None else made

    def scope(self, name: str) -> Weights:
        return self._view(self._full(name), self.cuts)

    def shared(self, name: str, build: Callable[[Weights], object]) -> Any:
        """What several users have in common, under a name from the root: built for the first of them only."""
        if name not in self._made:
            self._made[name] = build(self._view(name, self.cuts))
        return self._made[name]

    def for_share(self, share: int) -> Weights:
        """The same view of one share of the rank's: see `Cuts.for_share`."""
        return self._view(self.prefix, self.cuts.for_share(share))

    def _view(self, prefix: str, cuts: Cuts) -> Weights:
        return type(self)(self.checkpoint, self.names, self.target, prefix, self._used, self._made, cuts)

    def find_cut(self, name: str) -> Cut | None:
        """What this rank keeps of a tensor; None: all of it."""
        return self.cuts.find(self._full(name))

    def _part_of(self, name: str) -> StoredPart:
        is_plain = name.removesuffix(".weight") in PLAIN
        return self.cuts.part_of(self._full(name), None if is_plain else self.target.quantize)

    def __contains__(self, name: str) -> bool:
        try:
            source, _ = self.names.resolve(self._full(name), self.checkpoint)
        except UnknownName:
            return False
        return all(s in self.checkpoint for s in sources_of(source))

    def read(self, name: str, rows: Range | None = None) -> Tensor | Weight:
        """What this rank keeps of our name, or these rows of it, in the checkpoint's own format.

        Raises MissingTensor with both names, and ShapeMismatch.
        """
        full, part = self._full(name), self._part_of(name)
        part = StoredPart(full, (rows,)) if rows else part
        try:
            source, fields = self.names.resolve(full, self.checkpoint)
        except UnknownName:
            raise MissingTensor(f"{full}: this family's name map has no rule for it") from None
        if isinstance(source, str):
            return self._read(source, full, part, self.target.feed)
        stored = [self._read(s, full) for s in source.sources]
        if part.rows is not None and source.is_joined:
            return keep_joined(stored, part.rows)
        return part.keep(make_derived(source, stored, fields, full))

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Plain numbers on the target's device, in its compute dtype unless `dtype` says otherwise."""
        return self._numbers(name, as_tensor(self.read(name)), shape, dtype)

    def _numbers(
        self, name: str, value: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        value = value.to(device=self.target.device, dtype=dtype or self.target.dtype)
        if shape is not None and tuple(value.shape) != shape:
            raise ShapeMismatch(_shape_message(self._full(name), tuple(value.shape), shape))
        self.target.weights_nbytes += value.numel() * value.element_size()
        return value.contiguous()

    def stored(self, name: str, shape: tuple[int, int]) -> Tensor | Weight:
        """Plain numbers as `tensor` gives them; a weight that is quantized as it is stored, on the device."""
        value = self.read(name)
        if isinstance(value, Tensor):
            return self._numbers(name, value, shape)
        return self._count(self._matrix(name, value, shape))

    def optional(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        return self.tensor(name, shape, dtype) if name in self else None

    def weight(self, name: str, shape: tuple[int, int] | None = None) -> Weight:
        """A matrix in its own format, on the target's device."""
        return self._count(self._matrix(name, self.read(name), shape))

    def _count(self, weight: Weight) -> Weight:
        self.target.weights_nbytes += weight.nbytes
        return weight

    def _matrix(self, name: str, value: Tensor | Weight, shape: tuple[int, int] | None) -> Weight:
        weight = as_weight(value, self._full(name)).to(self.target.device)
        if shape is not None and weight.shape != shape:
            raise ShapeMismatch(_shape_message(self._full(name), weight.shape, shape))
        return weight

    def linear(
        self, *names: str, in_size: int, out_sizes: tuple[int, ...], rows: Range | None = None
    ) -> Linear:
        """One linear layer of several fused row-wise: names ("q", "k", "v") under this scope.

        in_size, out_sizes: the widths the model needs of each part; ShapeMismatch says which is off. `rows`:
        those of the one weight that this rank has.
        """
        cut = self.find_cut(names[0])
        if cut is not None and cut.cols is not None:
            return self._divide(names[0], in_size, out_sizes[0])
        if rows is not None:
            return self._some_rows(names[0], (out_sizes[0], in_size), rows)
        target, full, before = self.target, self._full("+".join(names)), Counter(self.target.encoded)
        biases = self._biases(names, out_sizes)
        kept = target.shelf.find(full, in_size, out_sizes) if target.shelf else None
        weights: list[Weight | CachedWeight] = []
        if kept is None:
            weights += self._matrices(names, in_size, out_sizes)
        elif target.shelf:
            target.encoded.update(target.shelf.counts(full))
            weights, biases = self._from_shelf(names, kept, biases)
        made = Linear(weights, biases, self.bind, target.dtype, target.activations)
        target.weights_nbytes += made.nbytes
        if target.adapters:
            changes = {full: self.cuts.factor_part(full) for full in map(self._full, names)}
            target.adapters.attach(changes, made, out_sizes, self.bind)
        if target.shelf and kept is None:
            target.shelf.note(full, made, (in_size, out_sizes), target.encoded - before)
        return made

    def _divide(self, name: str, in_size: int, out_size: int) -> Linear:
        """A linear layer of which this rank has some inputs, `in_size` of them."""
        full, bias = self._full(name), self.optional(f"{name}.bias", (out_size,))
        part, weight = self._part_of(f"{name}.weight"), as_weight(self.read(f"{name}.weight"), full)
        build = partial(self._one, name)
        made: Linear = divide_linear(part, weight, bias, out_size, self.cuts, build, self.bind)
        if (made.n_in, made.n_out) != (in_size, out_size):
            raise ShapeMismatch(_shape_message(full, (made.n_out, made.n_in), (out_size, in_size)))
        self.target.weights_nbytes += made.nbytes
        return made

    def _some_rows(self, name: str, shape: tuple[int, int], rows: Range) -> Linear:
        weight = as_weight(self.read(f"{name}.weight", rows), self._full(name))
        bias = self.optional(f"{name}.bias", shape[:1])
        wanted = rows[1] - rows[0], shape[1]
        if weight.shape != wanted:
            raise ShapeMismatch(_shape_message(self._full(name), weight.shape, wanted))
        some = bias if bias is None else bias[slice(*rows)]
        made = self._one(name, weight, some, FactorPart((rows,), num_rows=shape[0]))
        self.target.weights_nbytes += made.nbytes
        return made

    def _one(self, name: str, weight: Weight, bias: Tensor | None, change: FactorPart) -> Linear:
        weight, target = self._encode(name, weight.to(self.target.device)), self.target
        made = Linear([weight], [bias], self.bind, target.dtype, target.activations)
        if target.adapters:
            target.adapters.attach({self._full(name): change}, made, (made.n_out,), self.bind)
        return made

    def linear_stack(
        self, numbers: Sequence[int], *names: str, in_size: int, out_sizes: tuple[int, ...], pack: Pack
    ) -> ExpertStack:
        """Linear layers of one shape in one stack, under the scopes of these numbers; see `linear`.

        They are read one after the other, so that no more than one of them is in memory twice.
        """
        stack = ExpertStack(len(numbers), self.target.dtype, pack)
        for e, number in enumerate(numbers):
            one = self.scope(str(number))
            stack.put(e, one._matrices(names, in_size, out_sizes), one._biases(names, out_sizes))
        self.target.weights_nbytes += stack.nbytes
        if self.target.adapters:
            ours = (self._full(f"{number}.{name}") for number in numbers for name in names)
            changes = {full: self.cuts.factor_part(full) for full in ours}
            self.target.adapters.attach_stack(changes, stack, out_sizes, self.bind)
        return stack

    def list_storages(self, names: Iterable[str], n_in: int) -> tuple[str, ...]:
        """The block formats that matrices of `n_in` columns will have; none where no kernel was tried."""
        target, ours = self.target, (f"{self._full(name)}.weight" for name in names)
        if target.chip is None or not target.chip.trials:
            return ()
        how = find_encoder(target.quantize, n_in) if target.quantize else None
        return list_storages(self.checkpoint, self.names, ours, how)

    def _biases(self, names: Sequence[str], out_sizes: Sequence[int]) -> list[Tensor | None]:
        biases = [self.optional(f"{name}.bias", (out,)) for name, out in zip(names, out_sizes, strict=True)]
        cut = self.find_cut(names[0])
        is_added_elsewhere = cut is not None and cut.cols is not None and self.cuts.first_share > 0
        return [None] * len(biases) if is_added_elsewhere else biases

    def _matrices(self, names: Sequence[str], in_size: int, out_sizes: Sequence[int]) -> list[Weight]:
        """The weights of a linear layer, one for each name, encoded if that was requested."""
        made = []
        for name, out in zip(names, out_sizes, strict=True):
            stored = f"{name}.weight"  # of an expert with divided inputs: one share, one range
            made.append(self._encode(name, self._matrix(stored, self.read(stored), (out, in_size))))
        return made

    def _from_shelf(
        self, names: Sequence[str], parts: Sequence[tuple[CachedWeight, int]], biases: Sequence[Tensor | None]
    ) -> tuple[list[Weight | CachedWeight], list[Tensor | None]]:
        """What was packed, and of each part the bias; the tensors it came from count as used."""
        for name in names:
            source, _ = self.names.resolve(self._full(f"{name}.weight"), self.checkpoint)
            self._used.update(sources_of(source))
        joined, at = list[Tensor | None](), 0
        for _, count in parts:
            some = [bias for bias in biases[at : at + count] if bias is not None]
            joined.append(torch.cat(some) if some else None)
            at += count
        return [kept for kept, _ in parts], joined

    def _encode(self, name: str, weight: Weight) -> Weight:
        """A plain weight of a linear layer in the requested blocks, where its rows are whole blocks."""
        target = self.target
        if target.quantize is None:
            return weight
        how = find_encoder(target.quantize, weight.shape[1])
        # Of "meta" is what is read once to find the order of reading: it has no numbers.
        if how is None or name in PLAIN or not isinstance(weight, Dense) or weight.tensor.is_meta:
            target.encoded[f"{weight.format} as it was"] += 1
            return weight
        threads = getattr(target.executor, "threads", None) or torch.get_num_threads()
        target.encoded[how.kind.name] += 1
        return how(weight.tensor, self._full(f"{name}.weight"), threads)

    def bind(self, op: Op, **sizes: object) -> Callable[..., Any]:
        """The variant of an op for this target; recorded for `plait info --ops`."""
        target = self.target
        fn, rows = op.bind_parts(self._facts(sizes), self.prefix, target.ops, target.no_fuse)
        target.bound.extend(rows)
        return fn

    def bind_pair(
        self, writer: Op, reader: Op, **sizes: object
    ) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
        """What writes a cache and what reads it: kernels of one name, because both know how it lies there.

        The writer is None where there is none of the reader's name, or `no_fuse` names it: the reader then
        writes, and mixers call the ops that the writer replaces.
        """
        target, facts = self.target, self._facts(sizes)
        read, rows = reader.bind_parts(facts, self.prefix, target.ops, target.no_fuse)
        target.bound.extend(rows)
        if writer.name in target.no_fuse:
            return None, read
        write, row = writer.bind(facts, self.prefix, target.ops)
        if row.variant in ("reference", "composition") or row.variant != rows[0].variant:
            return None, read
        target.bound.append(row)
        return write, read

    def _facts(self, sizes: Mapping[str, object]) -> OpFacts:
        target = self.target
        shared = {n: getattr(target, n) for n in ("block_size", "kv_dtype", "state_dtype", "deterministic")}
        return OpFacts(target.platform, target.dtype, shared | dict(sizes), target.executor, target.chip)

    def list_unused(self) -> list[str]:
        """Their tensors that no mixer read and the family does not ignore."""
        ignored = self.names.ignored
        self._used.update(list_dropped(self.cuts, self.names, self.checkpoint))
        left = (n for n in self.checkpoint.names() if n not in self._used)
        return sorted(n for n in left if not (ignored and ignored.search(n)))

    def check_all_used(self, *, logs: bool = True) -> None:
        """To be called when all is built; `logs` what was encoded. Raises UnusedTensor if one is left."""
        if left := self.list_unused():
            raise UnusedTensor(
                f"the model does not use {len(left)} tensor(s) of the checkpoint: {list_some(left, 8)}. "
                "Either the architecture was detected wrongly (see `plait info`) or the family is incomplete."
            )
        if logs:
            log_encoded(self.target.quantize, self.target.encoded)

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def _read(
        self, source: str, ours: str, part: StoredPart = WHOLE, feed: WeightFeed | None = None
    ) -> Tensor | Weight:
        if source not in self.checkpoint:
            near = difflib.get_close_matches(source, self.checkpoint.names(), 1, 0.6)
            hint = f" (nearest: {near[0]!r})" if near else ""
            raise MissingTensor(f"{ours} wants {source!r}; the checkpoint has no such tensor{hint}")
        self._used.add(source)
        is_fed = feed is not None and feed.has(source, part)
        value = feed.take(source, part) if feed and is_fed else part.keep(self.checkpoint.read(source))
        if self.target.on_read:
            size = value.nbytes if not isinstance(value, Tensor) else value.numel() * value.element_size()
            self.target.on_read(source, size)
        return value


def _shape_message(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name}: the file has shape {list(found)}, the model wants {list(wanted)}"
