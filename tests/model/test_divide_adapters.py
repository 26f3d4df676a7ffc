"""Adapters on several ranks: what ranks add together is what the merged model computes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.divided import Cuts, FactorPart, list_names_elsewhere
from plait.errors import CheckpointError
from plait.families.common.resolved import Resolved
from plait.loading.meta.meta_model import meta_cuts
from plait.model.decoder import Decoder
from plait.model.divide import count_shares, divide_model
from plait.model.layers.layers import Batch
from plait.ops.low_rank import AdapterLimits, AdapterRows
from plait.ops.ranks import Alone, Comm
from plait.partition import Rank
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.parity import Memory, in_pieces, resolved, worst
from tests.loading.adapters.made import linear_modules, write_peft
from tests.model.test_divide import CLOSE, FEW, IDS, can_run_on, move_last_bits, target_of
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


def write(name: str, folder: Path) -> tuple[Resolved, Memory]:
    """A family's tiny model, and in `folder`/a an adapter of all that one rank takes."""
    tiny.write(name, folder / "base")
    config, tensors, _ = tiny.read(folder / "base")
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    write_peft(folder / "all", tensors, linear_modules(tensors))
    match = AdapterMatch(open_peft(folder / "all", 64), found.hf_names or found.names)
    target = target_of(found, is_native=False)
    target.adapters = AdapterSlots(AdapterLimits(1, 64), [match])
    rank_decoder(found, checkpoint, target, Alone())
    taken = set[str]()
    for ours in (name for place in target.adapters._places for name in place.parts):
        with suppress(CheckpointError):
            match.take(ours)
            taken.update(match._sources(ours))
    modules = [module for module in linear_modules(tensors) if f"{module}.weight" in taken]
    if modules:
        write_peft(folder / "a", tensors, modules)
    return found, checkpoint


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in tiny.VARIANTS]
)
def test_ranks_add_what_an_adapter_changes(name: str, tmp_path: Path) -> None:
    found, checkpoint = write(name, tmp_path)
    if (shares := count_shares(found.spec)) == 1 or not (tmp_path / "a").exists():
        pytest.skip("it cannot be divided, or takes no adapter")

    def work(comm: Comm, *, is_native: bool = False) -> list[Tensor]:
        return of_ranks(found, checkpoint, tmp_path / "a", comm, is_native=is_native)

    wanted = work(Alone())
    allowed = CLOSE * max(1.0, float(wanted[0].abs().max()))
    for whole_experts in (False, True):
        if not can_run_on(found, 2, whole_experts=whole_experts):
            continue
        for logits in run_ranks(work, 2, whole_experts=whole_experts):
            off = max(map(worst, logits, wanted))
            assert off < allowed or off < 2 * effect_of_last_bits(found, checkpoint, tmp_path / "a", wanted)
    alone = work(Alone(Rank(shares=shares)), is_native=True)
    for logits in run_ranks(lambda comm: work(comm, is_native=True), 2, shares):
        assert all(map(torch.equal, logits, alone))


def effect_of_last_bits(found: Resolved, checkpoint: Memory, adapter: Path, wanted: list[Tensor]) -> float:
    """The largest difference of logits when every weight is off by up to half of its last bit."""
    generator, largest = torch.Generator().manual_seed(1), 0.0
    for _ in range(4):
        moved = move_last_bits(checkpoint, generator)
        largest = max(largest, *map(worst, of_ranks(found, moved, adapter, Alone(), is_native=False), wanted))
    return largest


def test_experts_take_of_an_adapter_what_a_rank_has_of_them(tmp_path: Path) -> None:
    tiny.write("mixtral", tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    found = resolved(Memory(tensors), config)
    cuts = meta_cuts(found.spec, Rank(1, 2))
    at = "layers.0.ffn.experts.1"
    assert cuts.factor_part(f"{at}.down") == FactorPart(cols=(24, 48), num_cols=48)
    assert cuts.factor_part(f"{at}.up") == FactorPart(rows=((24, 48),), num_rows=48)
