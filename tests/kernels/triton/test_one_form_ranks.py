"""A model with what a GPU binds under `--deterministic`: 1, 2 and 4 ranks give the same bits, interpreted."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from triton.runtime import interpreter

from plait.checkpoint.adapter_slots import AdapterSlots
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.divided import Cuts, list_names_elsewhere
from plait.checkpoint.weights import Target
from plait.kernels.load import load_for_gpu
from plait.loading.target import loose_ops
from plait.model.divide import divide_model
from plait.ops.chip import EXAMPLES
from plait.ops.low_rank import AdapterLimits
from plait.ops.ranks import Alone, Comm
from plait.partition import Rank
from tests.families import tiny
from tests.families.parity import CPU, LONGEST, Memory, in_pieces, resolved, worst
from tests.loading.adapters.made import linear_modules, write_peft
from tests.model.test_divide_adapters import AdaptedDecoder
from tests.model.together import rank_decoder, run_ranks

IDS = [torch.arange(count) * 7 % 97 for count in (6, 3)]
SHARES = 4


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and the interpreter runs one kernel at a time."""
    lock, run = threading.RLock(), interpreter.GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize(("name", "sizes"), [("llama", (2, 4)), ("mamba2", (2,)), ("mixtral", (2, 4))])
def test_ranks_of_a_gpu_give_the_same_bits(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    load_for_gpu()
    variant = tiny.VARIANTS[name]
    more = {"num_attention_heads": 4, "num_key_value_heads": 2} if name != "mamba2" else {}
    tiny.write(name, tmp_path, tiny.Variant(variant.config, {**variant.changes, **more}))
    config, tensors, _ = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)

    def work(comm: Comm) -> tuple[list[Tensor], dict[str, str]]:
        target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size, chip=EXAMPLES[90])
        target.deterministic = True
        logits = in_pieces(rank_decoder(found, checkpoint, target, comm), IDS, target.block_size)
        return logits, loose_ops(target)

    wanted, loose = work(Alone(Rank(shares=SHARES)))
    assert loose == {}
    for size in sizes:
        for logits, _ in run_ranks(work, size, SHARES):
            assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


def most(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(map(worst, found, wanted))


@pytest.mark.slow
@pytest.mark.usefixtures("one_at_a_time")
def test_adapters_of_experts_are_divided_as_the_experts_are(tmp_path: Path) -> None:
    """One rank, two without shares, two with shares, and two with whole experts."""
    load_for_gpu()
    tiny.write("mixtral", tmp_path / "base")
    config, tensors, _ = tiny.read(tmp_path / "base")
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    write_peft(tmp_path / "a", tensors, [name for name in linear_modules(tensors) if ".experts." in name])

    def work(comm: Comm, *, is_exact: bool = False, is_plain: bool = False) -> list[Tensor]:
        target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size, chip=EXAMPLES[90])
        target.deterministic = is_exact
        cuts = Cuts.for_rank(comm, lambda rank: divide_model(found.spec, rank)[1])
        match = AdapterMatch(open_peft(tmp_path / "a", 64), found.hf_names or found.names)
        limits, elsewhere = AdapterLimits(1, 64, stacked_on=CPU), tuple(list_names_elsewhere(cuts))
        target.adapters = None if is_plain else AdapterSlots(limits, [match], elsewhere)
        decoder = rank_decoder(found, checkpoint, target, comm)
        if target.adapters is None:
            return in_pieces(decoder, IDS, target.block_size)
        assert target.adapters.has_experts
        target.adapters.load(1, match)
        return in_pieces(AdaptedDecoder(decoder), IDS, target.block_size)  # type: ignore[arg-type]

    alone = work(Alone())
    assert most(alone, work(Alone(), is_plain=True)) > 1e-2
    for whole_experts in (False, True):
        for logits in run_ranks(work, 2, whole_experts=whole_experts):
            assert most(logits, alone) < 1e-5
    exact = work(Alone(Rank(shares=2)), is_exact=True)
    assert most(exact, alone) < 1e-5
    for logits in run_ranks(partial(work, is_exact=True), 2, 2):
        assert all(torch.equal(a, b) for a, b in zip(logits, exact, strict=True))
