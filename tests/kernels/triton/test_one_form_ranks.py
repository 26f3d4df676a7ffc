"""A model with what a GPU binds under `--deterministic`: 1, 2 and 4 ranks give the same bits, interpreted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from triton.runtime import interpreter

from plait.checkpoint.weights import Target
from plait.kernels.load import load_for_gpu
from plait.loading.target import loose_ops
from plait.ops.chip import EXAMPLES
from plait.ops.ranks import Alone, Comm
from plait.partition import Rank
from tests.families import tiny
from tests.families.parity import CPU, LONGEST, Memory, in_pieces, resolved
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
