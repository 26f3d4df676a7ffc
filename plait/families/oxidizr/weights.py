"""From an oxidizr checkpoint's tensors to ours: what is renamed, and what is made of what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from plait.checkpoint.names import Derived, Source
from plait.families.common.recipes import Stored, conv, exp_rounded
from plait.families.oxidizr.names import Catalog, MixerKind
from plait.quant.halves import Halves
from plait.quant.weight import as_tensor, as_weight

A_RANGE = (1e-6, 1e6)  # the trainer clamps exp(A_log) to it
TakeA = Literal["trainer", "saved"]


def read_negative_a(a_log: Stored, **_: str) -> Tensor:
    """A = -exp(A_log)."""
    return -exp_rounded(as_tensor(a_log)).clamp(*A_RANGE)


def trainer_a(a_log: Stored, **_: str) -> Tensor:
    """A = -(1 … H): what the trainer's forward pass has used whatever its file says."""
    return -torch.arange(1.0, a_log.shape[0] + 1)


def read_growing_a(a_log: Stored, **_: str) -> Tensor:
    """Mamba1's A is exp(-a_log): positive, so that the state grows up to its limit."""
    return exp_rounded(-as_tensor(a_log))


def by_head(heads: int, *parts: Tensor) -> Tensor:
    """Matrices [heads · n, in], interleaved: each head's rows of the first, then of the second."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _query(heads: int, *sources: str) -> Derived:
    """No norm sits between the query's down- and up-projection, so they are one matrix."""

    def join(up: Stored, down: Stored, turned: Stored, **_: str) -> Tensor:
        whole = (as_tensor(up).double() @ as_tensor(down).double()).float()
        return by_head(heads, whole, as_tensor(turned).float())

    return Derived(join, sources, is_product=True)


def _key_value(heads: int, *sources: str) -> Derived:
    def join(k: Stored, v: Stored, **_: str) -> Stored:
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            return by_head(heads, k, v)
        return Halves(as_weight(k), as_weight(v), heads, turned=False)

    return Derived(join, sources)


def _latent(*sources: str) -> Derived:
    return Derived(lambda low, key, **_: torch.cat([as_tensor(low), as_tensor(key)]), sources)


def _slice_expert(source: str, *, flip: bool) -> Derived:
    """One expert of a stack, as a weight matrix [out, in]."""

    def one(stack: Stored, e: str, **_: str) -> Tensor:
        matrix = as_tensor(stack)[int(e)]
        return matrix.T if flip else matrix

    return Derived(one, (source,))


def list_rules(
    catalog: Catalog, take_a: TakeA, heads: int, *, flip_stacks: bool
) -> dict[str, tuple[Source, ...]]:
    """`heads`: of the MLA layers; `flip_stacks`: stacked experts are [E, in, out]."""
    rules: dict[str, tuple[Source, ...]] = {}
    seen: set[tuple[str, str, str]] = set()
    for ours, theirs in catalog.names.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", ours)
        kind = catalog.layers[int(match[1])].mixer if match else ""
        entry = (kind, _general(ours), _general(theirs))
        if entry in seen:
            continue
        seen.add(entry)
        if not match:
            rules[ours] = (theirs,)
            continue
        convert = _Converter(catalog, int(match[1]), take_a, heads, flip_stacks)
        for key, source in convert(match[2], theirs):
            rules[key] = (*rules.get(key, ()), source)
    return rules


def _general(name: str) -> str:
    """A name with fields instead of the numbers of layer and expert."""
    name = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.{i}.", name)
    return re.sub(r"\.experts\.\d+\.|^experts\.\d+\.", ".experts.{e}.", name)


class _Converter:
    """One layer's tensors as rules of the name map: (our pattern, source)."""

    def __init__(self, catalog: Catalog, layer: int, take_a: TakeA, heads: int, flip_stacks: bool) -> None:
        self.catalog, self.layer, self.heads, self.flip = catalog, layer, heads, flip_stacks
        decay: dict[MixerKind, Callable[..., Tensor]] = {"mamba1": read_growing_a}
        chosen = trainer_a if take_a == "trainer" else read_negative_a
        self.a = decay.get(catalog.layers[layer].mixer, chosen)

    def __call__(self, leaf: str, theirs: str) -> Iterator[tuple[str, Source]]:
        source = _general(theirs)
        if leaf == "ssm.A_log":
            yield "layers.{i}.ssm.A", Derived(self.a, (source,))
        elif leaf == "ssm.conv.weight":
            yield "layers.{i}.ssm.conv.weight", conv(source)
        elif leaf.startswith("ffn.stacked."):
            ours = leaf.replace("stacked", "experts.{e}")
            yield f"layers.{{i}}.{ours}", _slice_expert(source, flip=self.flip)
        elif leaf == "attn.w_uq.weight":
            yield "layers.{i}.attn.q.weight", _query(self.heads, *self._three("uq", "dq", "qr"))
        elif leaf == "attn.w_uk.weight":
            yield "layers.{i}.attn.kv_b.weight", _key_value(self.heads, *self._three("uk", "uv"))
        elif leaf == "attn.w_dkv.weight":
            yield "layers.{i}.attn.kv_a.weight", _latent(*self._three("dkv", "kr"))
        elif not leaf.startswith("attn.w_"):
            yield _general(f"layers.{self.layer}.{leaf}"), source

    def _three(self, *parts: str) -> list[str]:
        ours = (f"layers.{self.layer}.attn.w_{part}.weight" for part in parts)
        return [_general(self.catalog.theirs(name)) for name in ours]
