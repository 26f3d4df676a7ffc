"""Native attention over several steps: history, chunks, batches, threads, poisoned memory, recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.load import executor
from plait.ops.attention import paged_attention, paged_latent_attention
from plait.ops.entry import CODED_DTYPES, Sevens, head_forms, head_widths, latent_width
from plait.ops.registry import OpFacts

INT7 = ("keys of int7", "latents of int7")
KEYS, LATENT = (pytest.mark.drawn(what, INT7) for what in INT7)


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    block: int = 16
    window: int | None = None
    softcap: float | None = None
    kept: torch.dtype = torch.float32
    sinks: bool = False
    rounds: bool = False  # queries and weights of values, where the cache is bfloat16

    @property
    def near(self) -> float:
        return 1e-2 if self.rounds else 2e-5


class Memory:
    """Caches that nothing was written to (NaN), and the tables of sequences in shuffled blocks."""

    def __init__(self, shape: Shape, lengths: Sequence[int], spare: int = 3) -> None:
        needs = [-(-n // shape.block) for n in lengths]
        ids = torch.randperm(sum(needs)) + 1
        self.table = torch.zeros(len(lengths), max(needs) + spare, dtype=torch.int64)
        for row, part in zip(self.table, ids.split(needs), strict=True):
            row[: len(part)] = part
        self.block, self.done = shape.block, [0] * len(lengths)
        unwritten = -1 if not shape.kept.is_floating_point else float("nan")  # such scales are no numbers
        self.k, self.v = (
            torch.full((sum(needs) + 1, shape.block, shape.kv_heads, width), unwritten, dtype=shape.kept)
            for width in head_widths(shape.dim, name_of(shape.kept))
        )

    def index(self, counts: Sequence[int], which: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(block_table, slot_mapping, query_start, seq_lens) of a step; it counts as done."""
        slots = []
        for s, n in zip(which, counts, strict=True):
            at = range(self.done[s], self.done[s] + n)
            slots += [int(self.table[s, t // self.block]) * self.block + t % self.block for t in at]
            self.done[s] += n
        starts = torch.tensor([0, *counts]).cumsum(0)
        lens = torch.tensor([self.done[s] for s in which])
        return self.table[list(which)], torch.tensor(slots), starts, lens


def name_of(dtype: torch.dtype) -> str:
    names = {kept: name for name, kept in CODED_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@dataclass
class Text:
    """Queries, keys and values of one whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, shape: Shape, length: int) -> Text:
        kv = (length, shape.kv_heads, shape.dim)
        return cls(torch.randn(length, shape.heads, shape.dim), torch.randn(kv), torch.randn(kv))


def bound(cpu: Any, shape: Shape) -> Any:
    sizes = {"kv_dtype": name_of(shape.kept), "block_size": shape.block, "dim": shape.dim}
    sizes["activations"] = "int8" if shape.rounds else "int8x2"
    fn, row = paged_attention.bind(OpFacts("cpu", torch.float32, sizes, cpu))
    assert row.variant == ("native-bf16" if shape.rounds else "native"), row
    return fn


def attend(
    fn: Any, shape: Shape, texts: Sequence[Text], memory: Memory, counts: Sequence[int], which: Sequence[int]
) -> list[Tensor]:
    """One step: the next counts[i] tokens of texts[which[i]] -> outputs per sequence."""
    spans = [slice(memory.done[s], memory.done[s] + n) for s, n in zip(which, counts, strict=True)]
    q, k, v = (
        torch.cat([getattr(texts[s], name)[span] for s, span in zip(which, spans, strict=True)])
        for name in "qkv"
    )
    index = memory.index(counts, which)
    sinks = torch.linspace(-2.0, 3.0, shape.heads) if shape.sinks else None
    out = fn(q, k, v, memory.k, memory.v, *index, shape.dim**-0.5, shape.window, shape.softcap, sinks)
    return list(out.split(list(counts)))


def in_pieces(fn: Any, shape: Shape, text: Text, pieces: Sequence[int]) -> Tensor:
    memory = Memory(shape, [len(text.q)])
    return torch.cat([attend(fn, shape, [text], memory, [n], [0])[0] for n in pieces])


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    made = executor(1)
    yield made
    assert made is not None
    made.close()


SHAPES = [
    Shape(heads=3, kv_heads=3, dim=8),
    Shape(heads=4, kv_heads=2, dim=16, window=5),
    Shape(heads=9, kv_heads=3, dim=64),
    Shape(heads=8, kv_heads=2, dim=24, block=48, window=300),
    Shape(heads=16, kv_heads=2, dim=80, softcap=8.0),
    Shape(heads=8, kv_heads=2, dim=16, window=280, sinks=True),
    Shape(heads=14, kv_heads=2, dim=32, block=32, window=260, kept=torch.bfloat16),
    Shape(heads=13, kv_heads=1, dim=8, kept=torch.bfloat16),
    Shape(heads=4, kv_heads=4, dim=72, window=1000, kept=torch.bfloat16),
    Shape(heads=9, kv_heads=3, dim=64, kept=torch.int8),
    Shape(heads=8, kv_heads=2, dim=20, block=32, window=260, softcap=8.0, sinks=True, kept=torch.int8),
    Shape(heads=13, kv_heads=1, dim=8, window=5, kept=torch.int8),
    Shape(heads=9, kv_heads=3, dim=64, kept=torch.bfloat16, rounds=True),
    Shape(heads=14, kv_heads=2, dim=32, block=32, window=260, kept=torch.bfloat16, rounds=True),
    Shape(heads=16, kv_heads=2, dim=80, softcap=8.0, kept=torch.bfloat16, rounds=True),
    Shape(heads=8, kv_heads=2, dim=18, window=5, sinks=True, kept=torch.bfloat16, rounds=True),
    Shape(heads=13, kv_heads=1, dim=8, window=1000, kept=torch.bfloat16, rounds=True),
    Shape(heads=9, kv_heads=3, dim=64, kept=torch.int16),
    Shape(heads=4, kv_heads=4, dim=96, block=32, window=260, softcap=8.0, sinks=True, kept=torch.int16),
]


def marked(shape: Any) -> Any:
    """A shape as a parameter: kernels of int7 are compiled for keys or for latents, as the commit draws."""
    if isinstance(shape, Shape):
        return pytest.param(shape, marks=KEYS) if shape.kept is torch.int16 else shape
    return pytest.param(shape, marks=LATENT) if torch.int16 in shape else shape


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "shape", [*map(marked, SHAPES[:-1]), pytest.param(SHAPES[-1], marks=pytest.mark.slow)], ids=str
)
def test_history_in_any_chunks_gives_the_same_bits(cpu: Any, alone: Any, shape: Shape) -> None:
    length = 530
    text = Text.of(shape, length)
    want = in_pieces(paged_attention, shape, text, [length])
    whole = in_pieces(bound(cpu, shape), shape, text, [length])
    torch.testing.assert_close(whole, want, rtol=shape.near, atol=shape.near)
    for pieces in ([*[1] * 20, 225, *[1] * 25, 260], [7] * 75 + [5], [255, 2, 256, 17], [512, 18]):
        assert torch.equal(in_pieces(bound(cpu, shape), shape, text, pieces), whole)
    for pieces in ([length], [510, *[1] * 20]):
        assert torch.equal(in_pieces(bound(alone, shape), shape, text, pieces), whole)


@pytest.mark.parametrize("shape", [*SHAPES[2:7], *SHAPES[9:11], *SHAPES[12:16], marked(SHAPES[17])], ids=str)
def test_a_batch_gives_each_sequence_the_bits_it_has_alone(cpu: Any, shape: Shape) -> None:
    lengths = [1, 40, 600, 17, 256, 257, 90, 3]
    texts = [Text.of(shape, n + 2) for n in lengths]
    fn = bound(cpu, shape)
    memory = Memory(shape, [n + 2 for n in lengths])
    everyone = range(len(lengths))
    steps = [attend(fn, shape, texts, memory, counts, everyone) for counts in (lengths, [1] * 8, [1] * 8)]
    for s, text in enumerate(texts):
        want = in_pieces(fn, shape, text, [lengths[s], 1, 1])
        assert torch.equal(torch.cat([step[s] for step in steps]), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 12, 13, 25])
def test_any_number_of_heads_may_share_a_kv_head(cpu: Any, ratio: int, rounds: bool) -> None:
    kept = torch.bfloat16 if rounds else torch.float32
    shape = Shape(heads=2 * ratio, kv_heads=2, dim=16, kept=kept, rounds=rounds)
    text = Text.of(shape, 70)
    want = in_pieces(paged_attention, shape, text, [70])
    for pieces in ([70], [66, 1, 1, 2]):
        got = in_pieces(bound(cpu, shape), shape, text, pieces)
        torch.testing.assert_close(got, want, rtol=shape.near, atol=shape.near)


def test_views_of_one_projection_are_read_where_they_lie(cpu: Any) -> None:
    shape = Shape()
    heads = torch.randn(20, shape.heads + 2 * shape.kv_heads, shape.dim)
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    text = Text(q, k, v)
    got = in_pieces(bound(cpu, shape), shape, text, [20])
    dense = Text(q.contiguous(), k.contiguous(), v.contiguous())
    memory = Memory(shape, [20])
    fn, index = bound(cpu, shape), memory.index([20], [0])
    viewed = fn(q, k, v, memory.k, memory.v, *index, shape.dim**-0.5)
    assert torch.equal(viewed, got)
    assert torch.equal(in_pieces(fn, shape, dense, [20]), got)


def test_scores_far_apart_do_not_overflow(cpu: Any) -> None:
    shape = Shape(heads=2, kv_heads=1, dim=16)
    text = Text.of(shape, 600)
    text.q.mul_(300.0)
    want = in_pieces(paged_attention, shape, text, [600])
    torch.testing.assert_close(in_pieces(bound(cpu, shape), shape, text, [600]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[9], SHAPES[12]], ids=str)
def test_a_recorded_step_serves_any_batch(cpu: Any, shape: Shape) -> None:
    lengths, capacity = [20, 300, 1], 64
    texts = [Text.of(shape, n + 3) for n in lengths]
    memory, fn = Memory(shape, [n + 3 for n in lengths]), bound(cpu, shape)
    attend(fn, shape, texts, memory, lengths, range(3))
    q = torch.zeros(capacity, shape.heads, shape.dim)
    k, v = (torch.zeros(capacity, shape.kv_heads, shape.dim) for _ in range(2))
    table, slots = torch.zeros(capacity, memory.table.shape[1] + 2, dtype=torch.int64), torch.zeros(capacity)
    slots, starts = slots.long(), torch.zeros(capacity + 1, dtype=torch.int64)
    lens = torch.zeros(capacity, dtype=torch.int64)
    with cpu.record(tokens=capacity, logits=capacity + 1) as program:
        out = fn(
            *(q, k, v, memory.k, memory.v, table, slots, starts, lens),
            *(shape.dim**-0.5, shape.window, shape.softcap),
        )
    for counts, which in (([1, 1, 1], [0, 1, 2]), ([2], [1]), ([1, 2], [2, 0])):
        begin = [memory.done[s] for s in which]
        index = memory.index(counts, which)
        fresh = zip(which, begin, counts, strict=True)
        parts = [(texts[s].q[a : a + n], texts[s].k[a : a + n], texts[s].v[a : a + n]) for s, a, n in fresh]
        for buffer, given in zip((q, k, v), zip(*parts, strict=True), strict=True):
            buffer[: sum(counts)] = torch.cat(given)
        for buffer, given in zip((table, slots, starts, lens), index, strict=True):
            buffer[tuple(slice(n) for n in given.shape)] = given
        cpu.run(program, tokens=sum(counts), logits=1, seqs=len(counts))
        for got, s, a in zip(out[: sum(counts)].split(counts), which, begin, strict=True):
            want = in_pieces(fn, shape, texts[s], [a, len(got)])
            assert torch.equal(got, want[a:])


LATENTS = [
    (3, 16, 4, torch.float32),
    (16, 32, 8, torch.bfloat16),
    (13, 20, 6, torch.float32),
    (5, 144, 32, torch.int8),
    (13, 20, 6, torch.int8),
    (5, 96, 32, torch.int16),
    (13, 64, 6, torch.int16),
]


def latent_in_pieces(
    fn: Any, sizes: tuple[int, int, int, torch.dtype], q: Tensor, latent: Tensor, pieces: Sequence[int]
) -> Tensor:
    _, rank, rope, kept = sizes
    memory = Memory(Shape(kv_heads=1, dim=rank + rope, kept=kept), [len(q)])
    width = latent_width(rank, rope, name_of(kept))
    cache = torch.full((*memory.k.shape[:2], width), memory.k.flatten()[0], dtype=kept)
    outs, at = [], 0
    for n in pieces:
        new = slice(at, at + n)
        index = memory.index([n], [0])
        outs.append(fn(q[new], latent[new], cache, *index, (rank + rope) ** -0.5, rank))
        at += n
    return torch.cat(outs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [*map(marked, LATENTS)], ids=str)
def test_latents_in_any_chunks_give_the_same_bits(
    cpu: Any, alone: Any, sizes: tuple[int, int, int, torch.dtype]
) -> None:
    heads, rank, rope, _ = sizes
    known = {"heads": heads, "kv_rank": rank, "rope_dim": rope, "block_size": 16}
    (two, row), (one, _) = (
        paged_latent_attention.bind(OpFacts("cpu", torch.float32, known, executor))
        for executor in (cpu, alone)
    )
    assert row.variant == "native"
    q, latent = torch.randn(300, heads, rank + rope), torch.randn(300, rank + rope)
    want = latent_in_pieces(paged_latent_attention, sizes, q, latent, [300])
    whole = latent_in_pieces(two, sizes, q, latent, [300])
    torch.testing.assert_close(whole, want, rtol=2e-5, atol=2e-5)
    for pieces in ([127, 1, 1, 1, 1, 169], [11] * 27 + [3], [299, 1]):
        assert torch.equal(latent_in_pieces(two, sizes, q, latent, pieces), whole)
        assert torch.equal(latent_in_pieces(one, sizes, q, latent, pieces), whole)


def test_codes_are_the_reference_s_to_the_bit(cpu: Any) -> None:
    """Both sides round alike: whatever one wrote, decoded, is what the other wrote. Heads of zeros too."""
    shape = Shape(heads=2, kv_heads=2, dim=36, kept=torch.int8)
    text, ours, theirs = Text.of(shape, 21), Memory(shape, [21]), Memory(shape, [21])
    text.k[3], text.v[5], text.k[7, 0], text.v[9, 1] = 0.0, 0.0, 1e-42, 1e30
    theirs.table.copy_(ours.table)
    attend(bound(cpu, shape), shape, [text], ours, [21], [0])
    attend(paged_attention, shape, [text], theirs, [21], [0])
    blocks, d = theirs.k.shape[0], shape.dim
    for mine, wanted, is_key in ((ours.k, theirs.k, True), (ours.v, theirs.v, False)):
        flat = mine.view(blocks, shape.kv_heads, -1)  # one group of sixteen tokens a block
        codes, scales = flat[..., : 16 * d], flat[..., 16 * d :]
        codes = codes.unflatten(-1, (d, 16)).mT if is_key else codes.unflatten(-1, (16, d))
        scales = scales.unflatten(-1, (-1, 16, 2)).movedim(-2, -3).flatten(-2)  # [blocks, heads, 16, bytes]
        found = torch.cat([codes, scales], -1).transpose(1, 2)
        for t in range(21):
            block, offset = int(ours.table[0, t // 16]), t % 16
            assert torch.equal(found[block, offset], wanted[block, offset]), t


@KEYS
def test_int7_values_are_the_reference_s_to_the_bit(cpu: Any) -> None:
    shape = Shape(heads=2, kv_heads=2, dim=64, kept=torch.int16)
    text, ours, theirs = Text.of(shape, 21), Memory(shape, [21]), Memory(shape, [21])
    text.v[5], text.v[7, 0], text.v[9, 1] = 0.0, 1e-42, 1e30
    theirs.table.copy_(ours.table)
    attend(bound(cpu, shape), shape, [text], ours, [21], [0])
    attend(paged_attention, shape, [text], theirs, [21], [0])
    form = head_forms(shape.dim, shape.kept)[1]
    assert isinstance(form, Sevens)
    flat = ours.v.view(len(ours.v), shape.kv_heads, -1).view(torch.int8)  # a group of sixteen tokens a block
    codes, scales = flat[..., : 16 * form.scales_at], flat[..., 16 * form.scales_at :]
    found = torch.cat([codes.unflatten(-1, (16, -1)), scales.unflatten(-1, (16, 2))], -1).transpose(1, 2)
    wanted = theirs.v.view(torch.int8)
    for t in range(21):
        block, offset = int(ours.table[0, t // 16]), t % 16
        assert torch.equal(found[block, offset], wanted[block, offset]), t


@pytest.mark.parametrize(
    ("kept", "dim"), [(torch.int8, 16), pytest.param(torch.int16, 32, marks=KEYS)], ids=str
)
def test_a_number_that_is_none_is_not_hidden_by_codes(cpu: Any, kept: torch.dtype, dim: int) -> None:
    shape = Shape(heads=2, kv_heads=2, dim=dim, kept=kept)
    text = Text.of(shape, 4)
    text.v[2, 1, 5] = float("nan")
    out = in_pieces(bound(cpu, shape), shape, text, [4])
    assert out[2:, 1].isnan().all()
    assert out[:, 0].isfinite().all()


def test_what_it_cannot_serve_is_refused_by_name(cpu: Any) -> None:
    def reason(**sizes: Any) -> str:
        _, row = paged_attention.bind(OpFacts("cpu", torch.float32, sizes, cpu))
        return dict(row.skipped)["native"]

    assert "not of 24" in reason(block_size=24, dim=64)
    assert "float16" in reason(kv_dtype="float16")
    assert "even" in reason(dim=9)
    assert "multiple of 4, not of 18" in reason(dim=18, kv_dtype="int8")
    assert "multiple of 32, not of 80" in reason(dim=80, kv_dtype="int7")


def test_shapes_that_do_not_fit_are_rejected(cpu: Any) -> None:
    shape = Shape()
    text, memory, fn = Text.of(shape, 4), Memory(shape, [4]), bound(cpu, shape)
    index = memory.index([4], [0])
    with pytest.raises(ShapeMismatch, match="multiple of kv heads"):
        fn(text.q[:, :5], text.k, text.v, memory.k, memory.v, *index, 1.0)
    with pytest.raises(ShapeMismatch, match="v_cache"):
        fn(text.q, text.k, text.v, memory.k, memory.v.double(), *index, 1.0)
    with pytest.raises(ShapeMismatch, match="slot_mapping"):
        fn(text.q, text.k, text.v, memory.k, memory.v, index[0], index[1].int(), *index[2:], 1.0)
