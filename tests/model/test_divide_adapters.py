"""Adapters on several ranks: what ranks add together is what the merged model computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.divided import Cuts, list_names_elsewhere
from plait.families.common.resolved import Resolved
from plait.model.decoder import Decoder
from plait.model.divide import count_shares, divide_model
from plait.model.layers.layers import Batch
from plait.ops.low_rank import AdapterLimits, AdapterRows
from plait.ops.ranks import Alone, Comm
from plait.partition import Rank
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.parity import Memory, decoder, in_pieces, resolved, worst
from tests.loading.adapters.made import linear_modules, write_peft
from tests.model.test_divide import CLOSE, FEW, IDS, target_of
from tests.model.together import rank_decoder, run_ranks


class AdaptedDecoder:
    """A decoder of which every row has the adapter in slot 1."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __call__(self, batch: Batch, store: StateStore) -> Tensor:
        rows = AdapterRows.of(torch.ones_like(batch.token_ids))
        return self.inner(replace(batch, adapters=rows), store)


def write(name: str, folder: Path) -> tuple[Resolved, Memory, Memory]:
    """A family's tiny model, the same with an adapter merged, and the adapter in `folder`/a."""
    tiny.write(name, folder / "base")
    config, tensors, _ = tiny.read(folder / "base")
    changes = write_peft(folder / "a", tensors, linear_modules(tensors))
    merged = {at: value.clone() for at, value in tensors.items()}
    for module, change in changes.items():
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + 2.0 * change
    checkpoint = Memory(tensors)
    return resolved(checkpoint, config), checkpoint, Memory(merged)


def of_ranks(
    found: Resolved, checkpoint: Memory, adapter: Path, comm: Comm, *, is_native: bool
) -> list[Tensor]:
    target = target_of(found, is_native=is_native)
    match = AdapterMatch(open_peft(adapter, 64), found.hf_names or found.names)
    cuts = Cuts.for_rank(comm, lambda rank: divide_model(found.spec, rank)[1])
    target.adapters = AdapterSlots(AdapterLimits(1, 64), [match], tuple(list_names_elsewhere(cuts)))
    built = rank_decoder(found, checkpoint, target, comm)
    target.adapters.load(1, match)
    return in_pieces(AdaptedDecoder(built), IDS, target.block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in tiny.VARIANTS]
)
def test_ranks_add_what_an_adapter_changes(name: str, tmp_path: Path) -> None:
    found, checkpoint, merged = write(name, tmp_path)
    if (shares := count_shares(found.spec)) == 1:
        pytest.skip("it cannot be divided")
    wanted = in_pieces(decoder(found, merged), IDS)
    allowed = CLOSE * max(1.0, float(wanted[0].abs().max()))

    def work(comm: Comm, *, is_native: bool = False) -> list[Tensor]:
        return of_ranks(found, checkpoint, tmp_path / "a", comm, is_native=is_native)

    for whole_experts in (False, True):
        for logits in run_ranks(work, 2, whole_experts=whole_experts):
            assert max(map(worst, logits, wanted)) < allowed, f"{whole_experts=}"
    alone = work(Alone(Rank(shares=shares)), is_native=True)
    assert max(map(worst, alone, wanted)) < allowed
    for logits in run_ranks(lambda comm: work(comm, is_native=True), 2, shares):
        assert all(map(torch.equal, logits, alone))
