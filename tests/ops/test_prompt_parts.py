"""References of sparse attention take long prompts in parts, which changes no row."""

from __future__ import annotations

import pytest
import torch

from plait.ops import attention
from plait.ops.attention import visible
from plait.ops.block_sparse import block_sparse_attention, choose_blocks
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import choose_entries, entry_attention
from plait.ops.indexer import choose_keys, sparse_latent_attention
from plait.ops.registry import Op
from tests.ops.test_variants import copied

OPS = [
    *(choose_keys, sparse_latent_attention, choose_entries, entry_attention),
    *(choose_blocks, block_sparse_attention, choose_entry_blocks, choose_among_blocks),
]


def test_a_part_is_as_if_the_sequence_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_SCORES", 100)
    seqs = torch.tensor([0, 1, 1, 6]), torch.tensor([40, 1, 10])
    assert list(visible(torch.empty(6, 2), seqs, None, 4)) == [
        (0, slice(0, 1), 0, 40),  # one row, however many scores it has
        (1, slice(1, 1), 0, 1),  # a sequence without rows
        (2, slice(1, 3), 0, 7),
        (2, slice(3, 5), 0, 9),
        (2, slice(5, 6), 0, 10),
    ]
    assert list(visible(torch.empty(6, 2), seqs, 3)) == [
        (0, slice(0, 1), 37, 40),
        (1, slice(1, 1), 0, 1),
        (2, slice(1, 6), 3, 10),
    ]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_prompt_in_parts_gives_what_it_gives_whole(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    assert op.make
    args, kwargs = op.make(op.cases[1], torch.float32, "cpu")  # of 40 tokens the longest
    want = op.reference(*copied(args), **kwargs)
    monkeypatch.setattr(attention, "MOST_SCORES", 300)  # about two rows of it
    found = op.reference(*copied(args), **kwargs)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
