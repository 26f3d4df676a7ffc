"""How much of a GPU's memory is left for state: the largest step is run once, and its peak is measured.

Kernels, libraries and graphs take memory that no arithmetic foresees. So what they take is taken first, and
what the driver then calls free, without the peak, is what state may share (`EngineConfig.gpu_memory`).

Tables of penalties and biases have as many lines as requests with some, each as long as the vocabulary. They
grow with such requests, so what they may come to is not for state either.

Graphs share one pool, which is never given back and serves nothing else. It is about what the largest of
their steps takes while it runs op by op, so that is measured, too, and left free in addition: a decode, or a
step that checks drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.device import DeviceMemory, free_memory, out_of_memory, total_memory
from plait.engine.draft_places import SHARE
from plait.engine.memory_plan import ModelFacts, Sizing, gib, size_state
from plait.errors import DeviceLost, OutOfMemory
from plait.loading.make_runner import capacity_of
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.runner.device.replay import most_tables_nbytes
from plait.runner.steps.inputs import build_batch
from plait.schedule.drafts.passes import Denoising
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore

# Tokens of prompts, and numbers of sequences, by which kernels choose other forms: some that 16 divides, too.
PROMPTS = (3, 12, 16, 24, 32, 48, 64, 100, 128, 200, 256, 400, 512, 800)
BATCHES = (17, 65, 257)
Run = tuple[str, Callable[[], object]]  # (what it is, what runs it)
log = logging.getLogger("plait")


def check_weights_fit(name: str, nbytes: int, free: int, device: str) -> None:
    """Raises OutOfMemory with both numbers if the weights of a model alone are more than a GPU has left."""
    if nbytes > free:
        raise OutOfMemory(
            f"the weights of {name} take {gib(nbytes)}, and {gib(free)} are free on {device}; end what else "
            "uses it, choose a smaller model or quantization, or --cpu"
        )


def size_gpu(
    model: ModelFacts,
    decoder: Decoder,
    target: Target,
    config: EngineConfig,
    memory: DeviceMemory,
    draft_nbytes: int | None = None,
) -> Sizing:
    """Size the state of a model on a GPU by what is measured there.

    `draft_nbytes`: of what drafts and is loaded after this, 0 if its weights are there, None without drafts
    that have a state. The largest step runs with the longest context that could fit before it. Raises as
    `size_state` does.
    """
    host, total = free_memory(torch.device("cpu")), total_memory(target.device)
    capacity = capacity_of(config, decoder.spec, 1, config.block_size)
    tables = most_tables_nbytes(capacity, decoder.spec)

    def size(free: int) -> Sizing:
        free = max(free - tables, 0)
        left = free if draft_nbytes is None else leave_for_draft(free, draft_nbytes)
        return size_state(model, config, free_memory=left, free_host=host, total_memory=total)

    log.info("memory: tables of penalties and biases may take %s", gib(tables))
    if (free := memory.free()) < tables:
        raise OutOfMemory(
            f"tables of penalties and biases may take {gib(tables)}, and {gib(free)} are left by the "
            "weights; lower --max-num-seqs or --num-draft-tokens, or choose a smaller model or quantization"
        )
    longest = size(free).max_model_len
    runs = list_steps(decoder, config, longest, target.device, target.dtype)

    def measure() -> int:
        return measure_room(memory, *runs)

    return size(target.ranks.measure(measure, config, longest) if target.ranks else measure())


def list_steps(
    decoder: Decoder, config: EngineConfig, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Run], list[Run]]:
    """The steps that `measure_room` runs: op by op, and captured ones. They are the same on all ranks.

    `max_model_len`: the longest context that could fit before they run.
    """
    most = 1 if config.speculate == "off" else 1 + config.num_draft_tokens  # tokens of a sequence
    if canvas := decoder.spec.canvas:
        most = 2 * canvas.size
    tokens = min(config.max_num_seqs * most, max(config.max_num_batched_tokens, config.max_num_seqs))
    checks, decodes = (replace(config, max_num_batched_tokens=n) for n in (tokens, config.max_num_seqs))
    where = max_model_len, device, dtype
    largest = largest_steps(decoder, config, *where, num_logits=canvas.size if canvas else 1)
    graphs = [  # decodes may run other variants than checks
        *largest_steps(decoder, decodes, *where),
        *largest_steps(decoder, checks, *where, num_logits=canvas.size if canvas else most),
    ]
    runs = [*largest, *small_prompts(decoder, config, *where)]
    return runs, graphs if decoder.spec.causal else []  # else no step is captured


def leave_for_draft(free: int, nbytes: int) -> int:
    """What is left for the model's state beside a draft model of so many bytes, which is loaded after it."""
    left = max(free - nbytes, 0)
    return left - left // SHARE


def measure_room(memory: DeviceMemory, runs: Sequence[Run], graphs: Sequence[Run] = ()) -> int:
    """Bytes that are left for state once each of `runs` has been run, and for each of `graphs`.

    What they keep, such as workspaces, is not free any more afterwards. Of what they give back the largest
    peak stays reserved, and the largest of `graphs` in addition. Raises OutOfMemory where one does not fit,
    and DeviceLost with the step in which the device failed.
    """

    def measure(what: str, run: Callable[[], object]) -> int:
        try:
            with out_of_memory(what):
                return memory.peak_of(run)
        except DeviceLost as error:
            raise DeviceLost(
                f"{error}; it was {what}. `--ops reference` computes with torch alone"
            ) from error

    peak = max((measure(*run) for run in runs), default=0)
    pool = max((measure(*run) for run in graphs), default=0)
    room = max(memory.free() - peak - pool, 0)
    log.info(
        "memory: the largest step takes %s, graphs take %s; %s are left", gib(peak), gib(pool), gib(room)
    )
    return room


def largest_steps(
    decoder: Decoder,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_logits: int = 1,
) -> list[Run]:
    """The largest step that a scheduler can plan, over garbage: all in block 0 and slot 0, where padding is.

    As many sequences as may run share `max_num_batched_tokens`, each at the end of the longest context.
    `num_logits`: rows of logits of each, at most. With adapters one step more, in which all have one.
    """
    tokens = config.max_num_batched_tokens
    seqs = min(config.max_num_seqs, tokens) if decoder.spec.causal else 1
    lengths = [min(tokens // seqs + (i < tokens % seqs), max_model_len) for i in range(seqs)]
    starts = [max_model_len - n if decoder.spec.causal else 0 for n in lengths]
    runs = _garbage_steps(decoder, config.block_size, starts, lengths, device, dtype, num_logits)
    ways = "lower --max-num-batched-tokens or --max-model-len"
    what = f"the largest step ({sum(lengths)} tokens, contexts of {max_model_len}; {ways})"
    return [(what, run) for run in runs]


def small_prompts(
    decoder: Decoder, config: EngineConfig, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Run]:
    """Steps that are smaller than the largest one, each a run over garbage.

    Kernels have other forms for other numbers of tokens and of sequences. Run here, they are compiled before
    the model is ready: else the first prompts would wait for a compiler, and every stream with them.
    """
    for tokens in PROMPTS:
        if tokens < min(config.max_num_batched_tokens, max_model_len):
            for run in _garbage_steps(decoder, config.block_size, [0], [tokens], device, dtype):
                yield f"a prompt of {tokens} tokens", run
    for seqs in BATCHES if decoder.spec.causal else ():
        if seqs < config.max_num_seqs and 2 * seqs < config.max_num_batched_tokens and max_model_len > 1:
            for run in _garbage_steps(decoder, config.block_size, [0] * seqs, [2] * seqs, device, dtype):
                yield f"{seqs} prompts of 2 tokens", run


def _garbage_steps(
    decoder: Decoder,
    block_size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    num_logits: int = 1,
) -> list[Callable[[], None]]:
    """A step of these tokens behind so many others, all of them in block 0 and slot 0, where padding is; and
    with adapters the same step of the first one's slot, which has more launches and takes more memory."""
    groups, ends = block_groups(decoder.states), [a + n for a, n in zip(starts, lengths, strict=True)]
    table = tuple((0,) * -(-max(ends) // block_size) for _ in groups)
    every = [*enumerate(zip(starts, lengths, strict=True))]

    @torch.inference_mode()
    def run(adapter: int) -> None:
        passed = Denoising(1.0, False) if decoder.denoiser and num_logits > 1 else None
        chunks = (
            Chunk(i, start, (0,) * n, table, 0, min(n, num_logits), adapter=adapter, denoising=passed)
            for i, (start, n) in every
        )
        plan = StepPlan(0, tuple(chunks))
        slots = 1 if has_slots(decoder.states) else 0
        store = StateStore(decoder.states, {g.name: 1 for g in groups}, slots, block_size, device, dtype)
        for tensor in store.tensors:
            tensor.zero_()
        batch = build_batch(plan, groups, block_size, device)
        logits = decoder(batch, store)
        torch.empty_like(logits)  # penalties, biases and masks make a copy

    return [partial(run, adapter) for adapter in ((0, 1) if decoder.adapters else (0,))]
