"""A sampler, and a runner with memory for sequences of its own, over loaded weights: alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.kernels.load import row_functions, sampling_kernels
from plait.model.decoder import Decoder
from plait.ops.registry import Binding
from plait.runner.host.sampler import RowOps
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler, log_softmax
from plait.runner.steps.replay import Observe
from plait.spec.canvas import CanvasSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore


def make_sampler(target: Target, vocab_size: int, banned: Iterable[int]) -> Sampler:
    """The sampler of a model that was built for `target`. `banned`: ids that are never chosen."""

    def native_rows() -> RowOps:
        return RowOps(*row_functions(target.executor, sampling_kernels()), log_softmax)

    return Sampler(
        vocab_size,
        banned=banned,
        device=str(target.device),
        ops=target.ops,
        executor=target.executor,
        chip=target.chip,
        native_rows=native_rows if target.executor else None,
    )


def bind_step(kind: str, *, is_recorded: bool) -> Binding:
    """How steps run, in words, as a row of `plait info --ops`: recorded, or op by op and why."""
    if is_recorded:
        return Binding("step", "recorded", kind, ())
    return Binding("step", "op by op", "", (("recorded", kind),))


class StateSizes(Protocol):
    """How much memory sequences get: `Sizing`, or what rank 0 sends of it."""

    @property
    def num_blocks(self) -> Mapping[str, int]: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


def capacity_of(config: EngineConfig, spec: ModelSpec, max_model_len: int, block_size: int) -> Capacity:
    """The largest step that an engine with these options plans."""
    return Capacity.of(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        max_model_len,
        block_size,
        num_draft_tokens=0 if config.speculate == "off" else config.num_draft_tokens,
        canvas=spec.canvas.size if isinstance(spec.canvas, CanvasSpec) else 0,
    )


def make_runner(
    decoder: Decoder,
    sampler: Sampler,
    target: Target,
    config: EngineConfig,
    sizes: StateSizes,
    *,
    records: bool = True,
    observe: Observe | None = None,
) -> ModelRunner:
    """`records` False: every step runs op by op, as it does on CPUs where ranks meet between two ops.

    `observe`: is shown the hidden states of every step.
    """
    store = StateStore(
        *(decoder.states, sizes.num_blocks, sizes.num_slots, sizes.block_size, target.device, target.dtype)
    )
    capacity = capacity_of(config, decoder.spec, sizes.max_model_len, sizes.block_size)
    meets = target.comm.rank.size > 1 and target.device.type == "cpu"
    runner = ModelRunner(
        decoder,
        store,
        sampler,
        target.device,
        executor=target.graphs or target.executor,
        capacity=capacity if records and not meets else None,
        observe=observe,
    )
    runner.lead = target.ranks
    if observe and runner.replay is not None and target.graphs is None:
        runner.replay.show(observe)  # graphs of a device are captured so already
    return runner
