"""Decodes on GPUs by torch, in shapes that no data decides, find what the references find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels.torch import front
from plait.kernels.torch.compressed import attend, choose, choose_among, choose_in_blocks
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import choose_entries, entry_attention
from plait.ops.front import begin_slots, front_attention
from plait.ops.registry import Op

MORE = 3  # blocks in tables behind those that sequences have


def decodes(op: Op, case: Any) -> tuple[list[Any], list[Any], Tensor]:
    """(arguments of whole prompts, those of the last token of each, which rows these are).

    What sequences do not have of their memory is no number.
    """
    assert op.make
    torch.manual_seed(0)
    whole = list(op.make(case, torch.float32, "cpu")[0])
    for i, value in enumerate(whole):
        if isinstance(value, Tensor) and value.dim() >= 3 and i in (3, 4) and value.is_floating_point():
            whole[i] = torch.full_like(value, float("nan"))
    last = torch.tensor(case["seqs"]).cumsum(0) - 1
    count, total = len(last), sum(case["seqs"])

    def pick(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(pick, value))
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.int64 and value.dim() == 2:  # block tables
            return torch.cat([value, torch.zeros(count, MORE, dtype=torch.int64)], 1)
        if value.dim() == 1 and len(value) == count + 1 and int(value[-1]) == total:
            return torch.arange(count + 1)
        return value[last] if len(value) == total and value.dim() else value

    return whole, [pick(value) for value in whole], last


@pytest.mark.parametrize("case", choose_entries.cases, ids=str)
def test_decodes_choose_the_entries_that_prompts_choose(case: Any) -> None:
    whole, alone, last = decodes(choose_entries, case)
    want = choose_entries.reference(*whole)[last]
    assert torch.equal(choose(*alone), want)


@pytest.mark.parametrize("case", choose_entry_blocks.cases, ids=str)
def test_decodes_choose_the_blocks_that_prompts_choose(case: Any) -> None:
    whole, alone, last = decodes(choose_entry_blocks, case)
    assert torch.equal(choose_in_blocks(*alone), choose_entry_blocks.reference(*whole)[last])


@pytest.mark.parametrize("case", choose_among_blocks.cases, ids=str)
def test_decodes_choose_the_entries_of_blocks_that_prompts_choose(case: Any) -> None:
    whole, alone, last = decodes(choose_among_blocks, case)
    assert torch.equal(choose_among(*alone), choose_among_blocks.reference(*whole)[last])


@pytest.mark.parametrize("case", entry_attention.cases, ids=str)
def test_decodes_find_what_prompts_find(case: Any) -> None:
    whole, alone, last = decodes(entry_attention, case)
    want = entry_attention.reference(*whole)[last]
    torch.testing.assert_close(attend(*alone), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", front_attention.cases, ids=str)
def test_decodes_see_what_lies_before_each_text(case: Any) -> None:
    whole, alone, last = decodes(front_attention, case)
    want = front_attention.reference(*whole)[last]
    torch.testing.assert_close(front.attend(*alone), want, rtol=2e-5, atol=2e-5)


def test_slots_without_history_begin_with_the_initial_state() -> None:
    initial, state, slots = torch.randn(3), torch.randn(6, 3), torch.tensor([4, 2, 5])
    before, has_history = state.clone(), torch.tensor([True, False, True])
    assert front.begin(initial, state, slots, has_history, slots).all()
    begin_slots.reference(initial, before, slots, has_history, slots)
    assert torch.equal(state[1:], before[1:]), "slot 0 is padding's"


def test_padding_changes_no_other_row() -> None:
    """A row of padding is at position 0 of block 0, where all rows without an entry write."""
    whole, alone, last = decodes(entry_attention, entry_attention.cases[1])
    want = entry_attention.reference(*whole)[last]
    found = attend(*_padded(alone, len(last)))
    torch.testing.assert_close(found[: len(last)], want, rtol=2e-5, atol=2e-5)


def _padded(args: Sequence[Any], count: int) -> list[Any]:
    def pad(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(pad, value))
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.int64 and len(value) == count + 1:
            return torch.arange(count + 2)
        if len(value) != count:
            return value
        fill = (
            torch.ones_like(value[:1]) if value.dtype == torch.int64 and value.dim() == 1 else value[:1] * 0
        )
        return torch.cat([value, fill])

    found = [pad(value) for value in args]
    found[5] = None if args[5] is None else torch.cat([args[5], torch.full_like(args[5][:1], -1)])
    for n in (6, 7):  # its table and its place are those of block 0
        table, slots = found[n]
        found[n] = (table, torch.cat([slots[:count], torch.zeros(1, dtype=torch.int64)]))
    return found
