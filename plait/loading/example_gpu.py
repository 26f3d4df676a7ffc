"""What a GPU would run of a model, found on a CPU: the variants bound for it, and the launches of a step.

The model is built on the CPU for a chip that is made up. Its decode step, or its pass over canvases, is then
captured as a graph of that GPU would be. Triton's kernels are recorded and not run, so that this takes
seconds and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.loading.adapters.place import load_adapters, place_adapters
from plait.loading.build import draft_headers, load_drafter
from plait.loading.draft_heads import decoder_kind
from plait.loading.draft_model import load_draft_decoder
from plait.loading.open_model import Opened, Progress, load_decoder, open_model
from plait.loading.target import make_target
from plait.memory import BlockGroup, block_groups, has_slots
from plait.model.decoder import Decoder
from plait.model.layers.layers import Batch
from plait.ops.chip import Chip
from plait.ops.low_rank import AdapterRows
from plait.ops.registry import Binding, OpFacts
from plait.ops.sample import largest, sample
from plait.runner.device.capture import capture_step, decode_batch
from plait.runner.steps.inputs import build_batch
from plait.schedule.drafts.passes import Denoising
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.canvas import AnyCanvas, NoisyCanvasSpec
from plait.state.store import StateStore

SEQS = 2  # of the step that is captured
BLOCKS = 4  # in the block table of each of them


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """A step of `num_seqs` sequences on `chip`, of this `kind`.

    `launches`: how often each kernel or operator runs. `faults`: what prevents the capture of the step as one
    graph, with the number of times. Both are empty, and `no_step` says why, of a model without such a step.
    `drafts`: what was bound for what drafts, if anything does.
    """

    chip: Chip
    bindings: tuple[Binding, ...]
    launches: Mapping[str, int]
    faults: Mapping[str, int]
    num_seqs: int = SEQS
    kind: str = "decode step"
    no_step: str | None = None
    drafts: Target | None = None


def try_example(model: str, config: EngineConfig, chip: Chip, report: Progress) -> ExampleStep:
    """Build the model for a chip that is made up, and capture a step. Raises what `build` raises."""
    opened = open_model(model, config)
    target = make_target(opened, torch.device("cpu"), chip)
    named = place_adapters(opened, target)
    draft = draft_headers(opened, opened.tokenizer())
    decoder = load_decoder(opened, target, report, decoder_kind(draft))
    load_adapters(opened, target, named)
    if isinstance(files := load_drafter(draft, opened, target, decoder), Opened):
        load_draft_decoder(files, config, target, report)
    facts = OpFacts("cuda", torch.float32, {"vocab_size": decoder.spec.vocab_size}, chip=chip)
    bound = (*target.bound, *(op.bind(facts, "sampler", config.ops)[1] for op in (largest, sample)))
    if not decoder.spec.causal:
        why = "this model computes a whole sequence in every step"
        return ExampleStep(chip, bound, {}, {}, no_step=why, drafts=target.drafts)
    report("capturing a step", 0, 1)
    launches, faults = count_launches(decoder, target)
    kind = "decode step" if decoder.spec.canvas is None else "pass over canvases"
    return ExampleStep(chip, bound, launches, faults, kind=kind, drafts=target.drafts)


def count_launches(decoder: Decoder, target: Target) -> tuple[Counter[str], Counter[str]]:
    """(launches, faults) of a step. Without canvases a model may be of shapes alone, on the device "meta"."""
    groups, canvas = block_groups(decoder.states), decoder.spec.canvas
    blocks = {group.name: 2 * BLOCKS for group in groups}
    slots = SEQS + 1 if has_slots(decoder.states) else 0
    store = StateStore(decoder.states, blocks, slots, target.block_size, target.device, target.dtype)
    for tensor in store.tensors:
        tensor.zero_()
    batch = canvas_batch(groups, canvas, store) if canvas else decode_batch(groups, SEQS, BLOCKS, store)
    if decoder.adapters:
        batch = replace(batch, adapters=AdapterRows.on_device(torch.ones_like(batch.state_slots)))
    capture, _ = capture_step(decoder, store, batch, strict=False, is_dry=True)
    return Counter(capture.launches), Counter(capture.faults)


def canvas_batch(groups: Sequence[BlockGroup], canvas: AnyCanvas, store: StateStore) -> Batch:
    """A pass over a canvas of each sequence, behind as many known tokens, all of it where padding is."""
    size, passed = canvas.size, Denoising(1.0, False) if isinstance(canvas, NoisyCanvasSpec) else None
    table = tuple((0,) * -(-2 * size // store.block_size) for _ in groups)
    chunks = [Chunk(i, size, (0,) * size, table, 0, size, denoising=passed) for i in range(SEQS)]
    return build_batch(StepPlan(0, tuple(chunks)), groups, store.block_size, store.tensors[0].device)
