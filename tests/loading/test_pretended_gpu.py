"""What a GPU refuses, on a GPU that is pretended: tensors of both sides in one operator, waits in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.weights import Target, Weights
from plait.kernels.load import load_for_gpu
from plait.loading.meta.meta_model import list_ops
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import EXAMPLES
from plait.runner.device.capture import capture_step, decode_batch
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore
from tests.families import tiny
from tests.families.oracles import ORACLES, read_oracle
from tests.families.parity import Memory, resolved
from tests.pretend_gpu import GPU, pretended

BLOCK, LONGEST, CHIP = 8, 64, EXAMPLES[90]
QUICK = {"llama", "mamba2"}
EVERY = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*tiny.VARIANTS, *ORACLES)]


def build(name: str, folder: Path) -> tuple[Decoder, set[str]]:
    """A family's tiny model there, and the ops of which it binds a kernel that were not announced."""
    load_for_gpu()
    if name in ORACLES:
        config, checkpoint = read_oracle(name)
    else:
        tiny.write(name, folder)
        config, tensors, _ = tiny.read(folder)
        checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    target = Target(GPU, torch.bfloat16, LONGEST, found.spec.hidden_size, chip=CHIP, block_size=BLOCK)
    decoder = Decoder(found.spec, Weights(checkpoint, found.names, target))
    bound = {row.op for row in target.bound if row.variant not in ("reference", "composition")}
    return decoder, bound - list_ops(found, checkpoint).keys()


@pytest.mark.parametrize("name", EVERY)
def test_a_family_is_built_and_run_on_a_gpu_without_tensors_of_the_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt next to a decode, then a decode as it is captured."""
    with pretended(monkeypatch, runs=False) as journal:
        decoder, unannounced = build(name, tmp_path)
        assert not unannounced, "their kernels are not tried before they are bound"
        groups = block_groups(decoder.states)
        slots = 4 if has_slots(decoder.states) else 0
        counts = {group.name: 12 for group in groups}
        store = StateStore(decoder.states, counts, slots, BLOCK, GPU, torch.bfloat16)
        tables = tuple((1, 2, 3) for _ in groups), tuple((4, 5, 6) for _ in groups)
        chunks = [Chunk(2, 0, tuple(range(1, 12)), tables[1], 2 if slots else 0, 1)]
        if decoder.spec.causal:
            chunks = [Chunk(1, 5, (3,), tables[0], 1 if slots else 0, 1), *chunks]
        del journal.waits[:], journal.pageable[:]
        with torch.inference_mode():
            logits = decoder(build_batch(StepPlan(0, tuple(chunks)), groups, BLOCK, GPU), store)
        assert logits.device == GPU
        assert not journal.pageable
        waits = [wait for wait in journal.waits if not wait.startswith("runner/steps")]
        if decoder.spec.causal:
            del journal.waits[:]
            capture_step(decoder, store, decode_batch(groups, 2, 4, store), is_dry=True)
            assert not journal.waits
            assert not journal.pageable
        # Ops without kernels of their own read numbers of a prompt; nothing around them does.
        assert not [wait for wait in waits if not wait.startswith("ops/")]
