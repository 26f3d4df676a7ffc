"""Lower every launch of steps of families' tiny models, as a real GPU specializes it.

    python -m tests.kernels.triton.lower_families DTYPE [OPTIONS] [FAMILY...]

It prints one JSON object. --kept: what keys, values and latents are kept in; --quantize: the format of linear
weights; --one-form: as `--deterministic` runs. `uncompiled`: launches of a kind that gate C does not have;
`refused`: families that do not take the options, with why.

`lower_launches` has the cases of the ops. Here are the dtypes, strides and sizes that mixers give them: a
product of two dtypes, which the interpreter computes, is one that no GPU takes. The model lies on a GPU that
is pretended. A step has a prompt next to a decode, or decodes alone. Nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import pytest
import torch
from triton.runtime.jit import JITFunction

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.kernels.load import load_for_gpu
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import EXAMPLES
from plait.runner.device.capture import decode_batch
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore
from tests.families.every import NAMES, read_model
from tests.families.parity import resolved
from tests.kernels.triton.lower_launches import Lowering
from tests.pretend_gpu import GPU, pretended

BLOCK, LONGEST = 16, 128
DECODES, PROMPT = 2, 40  # of a prompt as many rows as chunks of scans, and tiles of experts, are made for
CHOICES = ("choose_experts", "choose_and_divide")


def run_steps(name: str, folder: Path, dtype: torch.dtype, **options: Any) -> None:
    """Build a family's tiny model, and run a step of decodes and one with a prompt."""
    config, checkpoint = read_model(name, folder)
    found = resolved(checkpoint, config)
    target = Target(
        GPU, dtype, LONGEST, found.spec.hidden_size, chip=EXAMPLES[90], block_size=BLOCK,
        **options,
    )  # fmt: skip
    decoder = Decoder(found.spec, Weights(checkpoint, found.names, target))
    groups, slots = block_groups(decoder.states), 4 if has_slots(decoder.states) else 0
    store = StateStore(decoder.states, {group.name: 12 for group in groups}, slots, BLOCK, GPU, dtype)
    tables = tuple((1, 2, 3) for _ in groups), tuple((4, 5, 6) for _ in groups)
    chunks = [Chunk(2, 0, tuple(range(1, PROMPT + 1)), tables[1], 2 if slots else 0, 1)]
    if decoder.spec.causal:
        chunks = [Chunk(1, 5, (3,), tables[0], 1 if slots else 0, 1), *chunks]
    with torch.inference_mode():
        decoder(build_batch(StepPlan(0, tuple(chunks)), groups, BLOCK, GPU), store)
        if decoder.spec.causal:
            decoder(decode_batch(groups, DECODES, 4, store), store)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dtype")
    parser.add_argument("--kept", default="model")
    parser.add_argument("--quantize")
    parser.add_argument("--one-form", action="store_true")
    parser.add_argument("families", nargs="*")
    given = parser.parse_intermixed_args()
    dtype, names = getattr(torch, given.dtype), given.families or NAMES
    options = {"kv_dtype": given.kept, "quantize": given.quantize, "deterministic": given.one_form}
    patch, lowering, refused = pytest.MonkeyPatch(), Lowering(), dict[str, str]()

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        try:
            lowering.run(kernel, grid, args, {"debug": False, **options})
        except Exception as error:
            text = " ".join(str(error).split())[-300:]
            lowering.faults[f"{family}: {kernel.fn.__name__}: {text}"] += 1
        if kernel.fn.__name__ in CHOICES:  # numbers of experts that the host's operators can read
            args[kernel.arg_names.index("index")].zero_()

    patch.setattr(JITFunction, "run", run)
    load_for_gpu()
    with pretended(patch):
        for family in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run_steps(family, Path(folder), dtype, **options)
                except UnsupportedModel as error:
                    refused[family] = str(error)
    found = {"launches": lowering.num_launches, "forms": len(lowering.seen), "refused": refused}
    found |= {"families": len(names) - len(refused), "faults": lowering.faults}
    sys.stdout.write(json.dumps({**found, "uncompiled": lowering.uncompiled}) + "\n")


if __name__ == "__main__":
    main()
