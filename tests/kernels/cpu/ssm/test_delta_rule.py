"""Delta rule, RG-LRU: prompts cut anywhere, batches, threads, slots of others, strided views, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.ssm.delta_rule import _gated_delta_scan
from plait.kernels.cpu.ssm.rg_lru import _rg_lru
from plait.kernels.load import executor
from plait.ops.delta import gated_delta_scan
from plait.ops.rg_lru import rg_lru

SLOTS = 7
LENGTHS, OWN, HISTORY = [1, 1, 1, 40, 3, 17], [5, 1, 3, 2, 6, 4], [True, True, False, True, False, True]


class Layer(NamedTuple):
    """What a layer brings to its scan: tensors with a row per token, others, the state of all slots."""

    tokens: dict[int, Tensor]  # by their place among the op's arguments
    weights: dict[int, Tensor]
    state: Tensor
    extra: tuple[Any, ...]  # what comes last

    def rows(self, first: int, last: int) -> Layer:
        return self._replace(tokens={place: m[first:last] for place, m in self.tokens.items()})

    def kept(self) -> Layer:
        return self._replace(state=self.state.clone())

    def call(self, fn: Callable[..., Tensor], where: tuple[Tensor, ...], decodes: int = 0) -> Tensor:
        arguments = self.tokens | self.weights
        return fn(*(arguments[i] for i in sorted(arguments)), self.state, *where, decodes, *self.extra)


def cut(tokens: int, *widths: int) -> list[Tensor]:
    """Neighbours in rows of one buffer, with NaN around them."""
    wide = torch.full((tokens, sum(widths) + 5), torch.nan)
    wide[:, 2:-3] = torch.randn(tokens, sum(widths))
    return list(wide[:, 2:-3].split(widths, -1))


def delta(heads: int, keys: int, size: int, dim: int, *, channel: bool = False, tiled: bool = False) -> Any:
    def made(tokens: int) -> Layer:
        q, k, v = cut(tokens, keys * size, keys * size, heads * dim)
        beta, step = cut(tokens, heads, heads * (size if channel else 1))
        step = step.abs_().unflatten(-1, (heads, size)) if channel else step.abs_()
        heads_of = (
            q.unflatten(-1, (keys, size)),
            k.unflatten(-1, (keys, size)),
            v.unflatten(-1, (heads, dim)),
        )
        rows = {**dict(enumerate(heads_of)), 3: step, 5: beta.sigmoid_()}
        state = torch.randn(SLOTS, heads, size, dim)
        return Layer(rows, {4: -2 * torch.rand(heads)}, state, (2.0 if channel else 1.0, tiled))

    return made


def lru(heads: int, dim: int) -> Any:
    def made(tokens: int) -> Layer:
        x, gates = cut(tokens, heads * dim, heads * 2 * dim)
        weights = {2: torch.randn(heads, 2 * dim), 3: -8 * torch.rand(heads * dim)}
        state = torch.randn(SLOTS, heads * dim)
        return Layer({0: x, 1: gates.unflatten(-1, (heads, 2 * dim))}, weights, state, ())

    return made


def where(lengths: list[int], slots: list[int], history: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(slots), torch.tensor([0, *lengths]).cumsum(0), torch.tensor(history)


def native(cpu: Any, layer: Layer) -> Callable[..., Tensor]:
    scan = _gated_delta_scan if layer.state.dim() == 4 else _rg_lru
    return lambda *args: scan(cpu, *args)


def reference(layer: Layer) -> Callable[..., Tensor]:
    return gated_delta_scan.reference if layer.state.dim() == 4 else rg_lru.reference


LAYERS = [
    pytest.param(delta(4, 2, 16, 64), id="delta-even"),
    pytest.param(delta(4, 2, 19, 45, tiled=True), id="delta-odd-tiled"),
    pytest.param(delta(3, 3, 7, 5, channel=True), id="delta-tiny-channels"),
    pytest.param(delta(2, 1, 128, 128), id="delta-128", marks=pytest.mark.slow),
    pytest.param(lru(3, 21), id="lru-odd"),
    pytest.param(lru(2, 80), id="lru-wide"),
]


@pytest.mark.parametrize("make", LAYERS)
def test_a_ragged_batch_is_what_the_reference_says(make: Any, cpu: Any) -> None:
    layer = make(sum(LENGTHS))
    mine, theirs = layer.kept(), layer.kept()
    own = where(LENGTHS, OWN, HISTORY)
    torch.testing.assert_close(
        mine.call(native(cpu, layer), own, 2), theirs.call(reference(layer), own, 2), rtol=2e-5, atol=2e-5
    )
    torch.testing.assert_close(mine.state, theirs.state, rtol=2e-5, atol=2e-5)
    untouched = [slot for slot in range(SLOTS) if slot not in OWN]
    assert torch.equal(mine.state[untouched], layer.state[untouched])


@pytest.mark.parametrize("make", LAYERS)
def test_a_sequence_does_not_depend_on_batch_composition_chunks_or_threads(make: Any, cpu: Any) -> None:
    layer, one = make(sum(LENGTHS)), executor(1)
    together = layer.kept()
    out = together.call(native(cpu, layer), where(LENGTHS, OWN, HISTORY), 2)
    alone, start = layer.kept(), 0
    for length, slot, past in zip(LENGTHS, OWN, HISTORY, strict=True):
        parts, done = [], 0
        for piece in (1, 2, 13, 64):
            size = min(piece, length - done)
            if size:
                rows = alone.rows(start + done, start + done + size)
                own = where([size], [slot], [past or done > 0])
                parts.append(rows.call(native(one, layer), own, int(past and size == 1)))
                done += size
        assert torch.equal(torch.cat(parts), out[start : start + length])
        start += length
    assert torch.equal(alone.state, together.state)
    one.close()


@pytest.mark.parametrize("make", LAYERS)
def test_without_history_a_slot_may_hold_anything(make: Any, cpu: Any) -> None:
    layer = make(5)
    clean, dirty = layer.kept(), layer.kept()
    dirty.state.fill_(torch.nan)
    own = where([5], [3], [False])
    fn = native(cpu, layer)
    assert torch.equal(clean.call(fn, own), dirty.call(fn, own))
    assert torch.equal(clean.state[3], dirty.state[3])


@pytest.mark.parametrize("make", LAYERS)
def test_a_recording_serves_every_batch(make: Any, cpu: Any) -> None:
    layer = make(64)  # stands for "as many tokens as the step has"
    slots, starts, history = where([1] * 6, list(range(1, 7)), [True] * 6)
    with cpu.record(tokens=64, logits=65) as program:
        out = layer.call(native(cpu, layer), (slots, starts, history))
    for lengths, own, past in ((LENGTHS, OWN, HISTORY), ([2, 1], [4, 2], [False, True])):
        seqs, tokens = len(lengths), sum(lengths)
        slots[:seqs], starts[: seqs + 1], history[:seqs] = where(lengths, own, past)
        expected = layer.rows(0, tokens).kept()
        wanted = expected.call(native(cpu, layer), where(lengths, own, past))
        cpu.run(program, tokens=tokens, logits=1, seqs=seqs)
        assert torch.equal(out[:tokens], wanted)
        assert torch.equal(layer.state, expected.state)


def test_runs_of_heads_have_the_bits_of_single_tiles(cpu: Any) -> None:
    """Single tokens go by whole heads, several on few threads; a longer sequence in the batch makes tiles."""
    layer = delta(16, 4, 16, 40)(6)
    runs, tiles = layer.kept(), layer.kept()
    out = runs.rows(0, 4).call(native(cpu, layer), where([1] * 4, [1, 4, 2, 3], [True, True, False, True]), 3)
    own = where([1] * 4 + [2], [1, 4, 2, 3, 5], [True, True, False, True, True])
    assert torch.equal(tiles.call(native(cpu, layer), own, 3)[:4], out)
    assert torch.equal(tiles.state[1:5], runs.state[1:5])


def test_shapes_that_a_kernel_would_misread_are_refused(cpu: Any) -> None:
    own = where([3], [1], [True])
    layer = delta(4, 2, 8, 8)(3)
    for place in (1, 3, 5):
        wrong = layer._replace(tokens={**layer.tokens, place: layer.tokens[place][:, :1]})
        with pytest.raises(ShapeMismatch, match="a delta scan of v"):
            wrong.call(native(cpu, layer), own)
    layer = lru(2, 8)(3)
    wrong = layer._replace(tokens={**layer.tokens, 1: layer.tokens[1][..., :10]})
    with pytest.raises(ShapeMismatch, match="wants gates"):
        wrong.call(native(cpu, layer), own)
