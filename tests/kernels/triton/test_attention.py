"""Triton's paged attention: bits that depend on no other sequence, grid or chunk; work lists of a step."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention import attention, attention_forms
from plait.kernels.triton.attention.attention import attend_latent, attend_paged, most_slots
from plait.kernels.triton.attention.layout import KEPT, PagedLayout
from plait.ops.attention import (
    BLOCK,
    paged_attention,
    paged_case,
    paged_latent_attention,
    write_paged,
)
from plait.ops.chip import EXAMPLES
from plait.ops.entry import key_codes, latent_codes
from plait.ops.registry import OpFacts
from plait.ops.relative import relative_attention
from tools.kernel_sources import read_rows

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = [600, 1, 300]


class Paged:
    """Sequences of LENGTHS in one cache, with queries for every token."""

    def __init__(self, kv_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        (self.table, self.slots, self.starts, self.lens), blocks = paged_case(LENGTHS, "cpu")
        self.q = torch.randn(sum(LENGTHS), HEADS, DIM).to(dtype)
        k, v = (torch.randn(sum(LENGTHS), KV_HEADS, DIM) for _ in range(2))
        self.caches = [torch.zeros(blocks, BLOCK, KV_HEADS, DIM, dtype=kv_dtype) for _ in range(2)]
        for cache, new in zip(self.caches, (k, v), strict=True):
            cache.view(-1, KV_HEADS, DIM)[self.slots] = new.to(kv_dtype)

    def attend(self, parts: list[tuple[int, int]], fn: Any = attend_paged, **more: Any) -> Tensor:
        """The last rows of some sequences, (sequence, count) each, one behind the other."""
        rows = [self.q[self.starts[s + 1] - count : self.starts[s + 1]] for s, count in parts]
        seqs = torch.tensor([s for s, _ in parts])
        starts = torch.tensor([0, *(count for _, count in parts)]).cumsum(0)
        args = (self.table[seqs], self.slots[:0], starts, self.lens[seqs], DIM**-0.5)
        out: Tensor = fn(torch.cat(rows), None, None, *self.caches, *args, **more)
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [{}, {"kv_dtype": "int8"}], ids=["numbers", "codes"])
def test_heads_of_512_columns_are_attended(kept: dict[str, str]) -> None:
    torch.manual_seed(3)
    case = {"seqs": [1, 3], "heads": 2, "kv_heads": 1, "dim": 512, "window": None, "softcap": None, **kept}
    assert paged_attention.make
    args, more = paged_attention.make(case, torch.float32, "cpu")
    wanted = paged_attention.reference(*deepcopy(args), **more)
    torch.testing.assert_close(attend_paged(*args, **more), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 290])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_chunk(
    window: int | None, dtype: torch.dtype
) -> None:
    """Tiles of float16 have 32 rows in a step with prompts, and 16 in one of decodes."""
    paged = Paged(dtype, dtype)
    batch = paged.attend([(0, 1), (1, 1), (2, 1)], window=window)
    for s in range(3):
        assert torch.equal(paged.attend([(s, 1)], window=window)[0], batch[s])
    chunks = paged.attend([(1, 1), (2, 3), (0, 40)], window=window)
    assert torch.equal(chunks[[43, 0, 3]], batch)
    reference = paged.attend([(0, 1), (1, 1), (2, 1)], paged_attention.reference, window=window)
    near = paged_attention.tolerance[dtype]
    torch.testing.assert_close(batch, reference, rtol=near, atol=near)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 40])
def test_what_lies_in_front_of_a_window_may_be_no_number(count: int) -> None:
    """Blocks that left the window are given back: their entries in the table are those of padding."""
    paged, window = Paged(), 270
    want = paged.attend([(0, count)], window=window)
    gone = (LENGTHS[0] - count - window + 1) // BLOCK
    assert gone * BLOCK % attention.SPLIT, "some of them are in a split that is read"
    paged.table[0, :gone] = 0
    for cache in paged.caches:
        cache[0] = torch.nan
    assert torch.equal(paged.attend([(0, count)], window=window), want)


def test_bits_do_not_depend_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, found = Paged(), []
    for programs in (1, 5, 37):
        monkeypatch.setattr(attention, "count_programs", lambda device, n=programs: n)
        found.append(paged.attend([(0, 1), (2, 2)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_splits_are_folded_when_partial_results_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged()
    apart = paged.attend([(0, 1), (2, 1)])
    monkeypatch.setattr(attention, "MOST_SLOTS", 2)
    assert torch.equal(paged.attend([(0, 1), (2, 1)]), apart)


@pytest.mark.parametrize(
    ("heads", "seqs", "blocks", "count"),
    [
        ((32, 8), 1, 4, 1),  # a split for 256 tokens
        ((32, 8), 3, 5, 3 * 2),
        ((32, 1), 3, 5, 3 * 2 * 2),  # 32 rows of one token are two tiles
        ((32, 8), 16, 2048, 4032),
        ((32, 32), 16, 2048, 1008),  # as many items: heads × partial results
    ],
)
def test_partial_results_take_what_the_tables_of_a_step_hold_and_256_mib_at_most(
    heads: tuple[int, int], seqs: int, blocks: int, count: int
) -> None:
    """No memory of blocks is needed: what a step over garbage takes is what a real one takes."""
    layout = PagedLayout(*heads, 128, 0, None, None, None)
    constants = layout.constants(seqs, 16)
    assert most_slots(torch.empty(seqs, blocks, device="meta"), 64, constants) == count


def test_layers_of_a_step_share_one_work_list(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, names, launch = Paged(), [], attention.launch

    def counted(kernel: Any, *args: Any, **more: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **more)

    monkeypatch.setattr(attention, "launch", counted)
    step: dict[Any, Any] = {}
    first = paged.attend([(0, 1), (2, 1)], step=step)
    assert torch.equal(paged.attend([(0, 1), (2, 1)], step=step), first)
    paged.attend([(0, 1), (2, 1)], step=step, window=20)
    assert names == ["count_items", "attend", "attend", "count_items", "attend"]
    for work in step.values():
        assert not work.counters.any(), "the program that ends a tile sets its counter back"


def test_splits_of_all_heads_of_a_latent_are_items() -> None:
    torch.manual_seed(5)
    (table, slots, _, lens), blocks = paged_case([600], "cpu")
    cache = torch.randn(blocks, BLOCK, 24)
    q = torch.randn(1, 48, 24)  # three tiles of one token
    step: dict[Any, Any] = {}
    args = (cache, table, slots[:0], torch.tensor([0, 1]), lens, 0.2, 16)
    out = attend_latent(q, None, *args, step)
    (work,) = step.values()
    assert int(work.items[1]) == 9
    assert torch.equal(attend_latent(q[:, 16:32], None, *args), out[:, 16:32])


def wide_case(kind: str) -> dict[str, Any]:
    """Heads as wide as shared memory is scarce for, in one token and in a prompt over a split."""
    seqs = {"seqs": [1, 3, 270], "kv_dtype": "float32"}
    if kind == "mla":
        return seqs | {"heads": 3, "kv_rank": 512, "rope_dim": 64}
    return seqs | {"heads": 2, "kv_heads": 1, "dim": int(kind), "window": None, "softcap": None}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["256", "512", "mla"])
def test_float32_queries_of_wide_heads_are_attended_in_tiles_that_consumer_gpus_hold(
    kind: str, kept: str
) -> None:
    op = paged_latent_attention if kind == "mla" else paged_attention
    assert op.make
    torch.manual_seed(3)
    args, more = op.make(wide_case(kind) | {"kv_dtype": kept}, torch.float32, "cpu")
    wanted = op.reference(*deepcopy(args), **more)
    rows, out = attend_last(kind, args, 20, more)
    torch.testing.assert_close(out, wanted[rows], rtol=1e-4, atol=1e-4)


def attend_last(kind: str, args: tuple[Any, ...], most: int, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(numbers of rows, their attention) of the last rows of each sequence, over caches with all keys."""
    count = 1 if kind == "mla" else 2
    q, new, caches = args[0], args[1 : 1 + count], args[1 + count : 1 + 2 * count]
    table, slots, starts, lens, *rest = args[1 + 2 * count :]
    if kind != "mla" and caches[0].dtype is torch.int8:  # codes of keys lie as kernels want them
        attention.place_all_heads(q, *new, *caches, slots, slots, None, None)
    else:
        codes = latent_codes(rest[1], q.shape[-1] - rest[1]) if caches[0].dtype is torch.int8 else None
        for cache, numbers in zip(caches, new, strict=True):
            write_paged(cache, numbers, slots, codes)
    counts = starts.diff().clamp(max=most)
    rows = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, starts[1:], strict=True)])
    where = table, slots[:0], torch.cat([starts[:1], counts.cumsum(0)]), lens
    fn = attend_latent if kind == "mla" else attend_paged
    return rows, fn(q[rows], *[None] * count, *caches, *where, *rest, **more)


def list_layouts() -> Iterator[tuple[PagedLayout, torch.dtype]]:
    """Every kind of heads and of latents, by the dtype of queries and what is kept."""
    for dtype, kept in product((torch.bfloat16, torch.float16, torch.float32), KEPT.values()):
        coded = kept == torch.int8
        for dim, rest in product((16, 64, 80, 96, 128, 192, 256, 512), (0,)):
            yield PagedLayout(8, 2, dim, rest, key_codes(dim) if coded else None, None, None, dtype), kept
        for dim, rest in ((128, 32), (256, 32), (512, 64)):
            form = latent_codes(dim, rest) if coded else None
            yield PagedLayout(16, 1, dim, rest, form, None, None, dtype), kept


def test_no_tile_takes_more_shared_memory_than_the_smallest_of_current_gpus_has() -> None:
    for layout, kept in list_layouts():
        assert layout.shared_nbytes(layout.keys(kept), kept) <= 99 << 10, (layout, kept)
        assert layout.keys(kept) >= 16


def test_what_a_tile_takes_is_what_compiled_forms_take() -> None:
    """Of the report of compiled kernels: it is a bound, and of plain numbers in stages what is there."""
    report = Path(__file__).resolve().parents[3] / "docs" / "gpu-kernels.md"
    shared: dict[str, int] = {}
    for key, (_, line) in read_rows(report).items():
        shared[key.form] = max(shared.get(key.form, 0), int(line.split(" | ")[4].removesuffix(" KiB")))
    for form in attention_forms.forms():
        if not form.name.startswith("attend,"):
            continue
        numbers = form.constants
        dtype, kept = (attention_forms.KINDS[form.types[name]] for name in ("q", "k_cache"))
        codes = key_codes(numbers["D"]) if numbers["GROUP"] else None
        layout = PagedLayout(1, 1, numbers["D"], numbers["REST"], codes, None, None, dtype)
        bound = layout.shared_nbytes(numbers["BN"], kept) / 1024
        is_whole = kept == dtype and form.num_stages > 1
        if numbers["BM"] == layout.rows(has_prompts=True, kept=kept) and is_whole:
            assert shared[form.name] == int(bound), form.name
        assert shared[form.name] <= bound, form.name


@pytest.mark.parametrize(
    ("sizes", "dtype", "chip", "bound"),
    [
        ({"dim": 512}, torch.float32, 86, True),
        ({"dim": 1024}, torch.bfloat16, 86, True),
        ({"dim": 1024}, torch.float32, 86, False),
        ({"dim": 1024}, torch.float32, 80, False),
        ({"dim": 1024}, torch.float32, 90, True),
        ({"dim": 1024, "kv_dtype": "bfloat16"}, torch.float32, 120, False),
        ({"kv_rank": 512, "rope_dim": 64}, torch.float32, 120, True),
        ({"kv_rank": 1024, "rope_dim": 64}, torch.float32, 120, False),
    ],
)
def test_no_attention_is_bound_that_a_chip_s_shared_memory_does_not_hold(
    sizes: dict[str, Any], dtype: torch.dtype, chip: int, bound: bool
) -> None:
    """Triton would refuse the launch at the model's sizes, after all trials were right."""
    facts = OpFacts("cuda", dtype, {"kv_dtype": "model", **sizes}, chip=EXAMPLES[chip])
    ops = [paged_latent_attention] if "kv_rank" in sizes else [paged_attention, relative_attention]
    for op in ops:
        _, row = op.bind(facts)
        assert (row.variant == "triton") == bound
        if not bound:
            why = dict(row.skipped)["triton"]
            assert f"KiB of shared memory, and a block on {EXAMPLES[chip].name} has" in why
