"""Sizes the memory of running sequences, KV cache blocks and slots: by need, under a limit. Arithmetic only.

Windows and slots are bounded per sequence and sized for `max_num_seqs`; full attention gets what
`max_num_seqs` sequences of `max_model_len` tokens need, or what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from plait.config import EngineConfig
from plait.errors import ConfigError, OutOfMemory
from plait.memory import BlockGroup, PagedState, SlotState, State, block_groups
from plait.schedule.allocation import Allocation, num_window_blocks
from plait.schedule.costs import SchedulerLimits
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.spec.canvas import AnyCanvas, NoisyCanvasSpec
from plait.unread_options import list_unread

DEFAULT_SHARE = 0.5  # of the memory that is free on a CPU when the weights are loaded
SNAPSHOT_SHARE = 0.25  # of the limit, at most, for snapshots of recurrent state
SNAPSHOTS_PER_SEQ = 2  # one at the prompt boundary, one at the end of the reply
HOST_SHARE = 0.25  # of free host memory, at most, for what has to leave the device
MOST_PLACES = 2048  # of noisy canvases in one step: each has a row of logits, as long as the vocabulary
LENGTHS = (1024, 8192, 32768, 131072)  # at which `plait info` shows what a sequence costs


class GroupSize(Struct, frozen=True):
    """One block group: `num_blocks` with the garbage block, bytes of one block over all its mixers."""

    group: BlockGroup
    num_blocks: int
    nbytes_per_block: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.nbytes_per_block


class Sizing(Struct, frozen=True):
    """The state memory of an engine. `num_slots` holds the garbage slot; 0: no mixer has recurrent state.

    `num_snapshots` of the slots are beyond what running sequences need. `host_nbytes`: the most host memory
    for what leaves the device. `notes`: what was made smaller than a default, or is not read, and why.
    """

    max_model_len: int
    block_size: int
    groups: tuple[GroupSize, ...]
    num_slots: int
    nbytes_per_slot: int
    notes: tuple[str, ...] = ()
    num_snapshots: int = 0
    host_nbytes: int = 0

    @property
    def num_blocks(self) -> Mapping[str, int]:
        """Blocks by group name, as the state store takes them."""
        return {size.group.name: size.num_blocks for size in self.groups}

    @property
    def nbytes(self) -> int:
        return sum(size.nbytes for size in self.groups) + self.num_slots * self.nbytes_per_slot

    def rows(self, weights_nbytes: int, *, is_lazy: bool = False) -> list[tuple[str, str, int]]:
        """The table that is shown at startup: (what, how many, bytes), the total last.

        `is_lazy`: the system gives memory to state as it is first written, so that the total is a bound.
        """
        table = [("weights", "", weights_nbytes)]
        for size in self.groups:
            table.append((f"paged state, {size.group.name}", f"{size.num_blocks - 1} blocks", size.nbytes))
        if self.num_slots:
            running = self.num_slots - self.num_snapshots
            slots, snapshots = running * self.nbytes_per_slot, self.num_snapshots * self.nbytes_per_slot
            table.append(("recurrent state", f"{running - 1} slots", slots))
            table.append(("snapshots of it", f"{self.num_snapshots} slots", snapshots))
        total = "total once all state is in use" if is_lazy else "total"
        return [*table, (total, "", weights_nbytes + self.nbytes)]

    def scheduler(
        self,
        config: EngineConfig,
        *,
        causal: bool,
        num_steps: int = 1,
        num_streamed_steps: int = 1,
        canvas: AnyCanvas | None = None,
    ) -> Scheduler:
        """A scheduler over exactly this memory. For numbers of steps and `canvas` see `SchedulerLimits`."""
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            max_model_len=self.max_model_len,
            max_step_s=config.max_step_ms / 1000 or None,
            num_steps=num_steps,
            num_streamed_steps=num_streamed_steps,
            causal=causal,
            canvas=canvas,
        )
        cache = CacheOptions(
            shares=config.prefix_cache,
            snapshot_interval=config.snapshot_interval,
            block_nbytes=tuple(size.nbytes_per_block for size in self.groups),
            slot_nbytes=self.nbytes_per_slot,
            host_nbytes=self.host_nbytes,
        )
        memory = Allocation(
            [size.group for size in self.groups],
            [size.num_blocks for size in self.groups],
            self.block_size,
            num_slots=self.num_slots,
            max_step_len=config.max_num_batched_tokens,
            trims=causal,
            cache=cache,
        )
        return Scheduler(limits, memory)


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What sizing must know about a model: its own longest sequence, the dtype it computes in, its states.

    `both_ways`: its attention keeps no state, and yet has places for `max_len` tokens only. `has_canvas`: it
    fills canvases; `tail`: places of one behind the longest sequence.
    """

    states: Mapping[str, State]
    max_len: int
    dtype: str
    causal: bool = True
    both_ways: bool = False
    has_canvas: bool = False
    tail: int = 0


def fit_canvas(config: EngineConfig, canvas: AnyCanvas | None) -> EngineConfig:
    """The options with which a model can write on canvases, if it does: a block holds whole ones, and a step
    those of all sequences, each with the one before it. Noisy ones may end anywhere, and are so large that
    fewer have logits in one step. Raises ConfigError for --speculate."""
    if canvas is None:
        return config
    if config.speculate != "off":
        raise ConfigError(
            f"speculate: {config.speculate} is set, but this model writes {canvas.size} tokens at once, "
            "which drafts cannot come before; leave the option out"
        )
    is_noisy = isinstance(canvas, NoisyCanvasSpec)
    num_seqs = (
        min(config.max_num_seqs, max(MOST_PLACES // canvas.size, 1)) if is_noisy else config.max_num_seqs
    )
    needed = 2 * canvas.size * num_seqs
    return replace(
        config,
        block_size=config.block_size if is_noisy else max(config.block_size, canvas.size),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, needed),
    )


def size_state(
    model: ModelFacts,
    config: EngineConfig,
    *,
    free_memory: int,
    free_host: int | None = None,
    total_memory: int | None = None,
) -> Sizing:
    """Size the memory of a model's state. `free_memory`: bytes free on the device once the weights are there.

    `free_host`: bytes free on the host, if that is another, as of a GPU; `total_memory`: all of the device,
    if known. The limit is `config.memory_limit`, else half of `free_memory`, of a GPU's the share that
    `config.gpu_memory` says. Raises ConfigError if the model cannot do
    the requested `max_model_len` or the device has less than `memory_limit`. Raises OutOfMemory with both
    numbers if not one such sequence fits. A length that no option set is made shorter instead, with a note.
    """
    if config.memory_limit is not None and total_memory is not None and config.memory_limit > total_memory:
        raise ConfigError(
            f"memory_limit: {config.memory_limit} bytes ({gib(config.memory_limit)}) are more than the "
            f"{gib(total_memory)} of memory that there are; give at most {total_memory}, or none"
        )
    share = DEFAULT_SHARE if free_host is None else config.gpu_memory
    limit, state = config.memory_limit or int(free_memory * share), _StateMemory(model, config)
    requested, notes = _length(model, config)
    how = dict(causal=model.causal, is_on_gpu=free_host is not None, has_canvas=model.has_canvas)
    notes += list_unread(config, model.states, **how)
    length = state.find_length(requested, limit)
    if length < requested:
        if config.max_model_len is not None or length < 1:
            raise OutOfMemory(_too_small(state, requested, limit))
        notes.append(
            f"max_model_len is {length} instead of {requested}: the state of a longer sequence does not fit "
            f"into {gib(limit)} (--memory-limit)"
        )
    nbytes, snapshots = state.nbytes_per_slot, 0
    if nbytes and model.causal:
        left = min(limit - state.one_sequence_nbytes(length), int(limit * SNAPSHOT_SHARE))
        snapshots = min(SNAPSHOTS_PER_SEQ * config.max_num_seqs, max(left, 0) // nbytes)
    groups, note = state.groups_within(length, limit - snapshots * nbytes)
    notes += [note] if note else []
    num_slots = config.max_num_seqs + 1 + snapshots if nbytes else 0
    host = config.swap_memory
    if host is None:
        free = free_memory if free_host is None else free_host
        each = sequence_nbytes(model.states, model.dtype, length, config.block_size)
        host = min(config.max_num_seqs * each, int(free * HOST_SHARE))
    return Sizing(length, config.block_size, groups, num_slots, nbytes, tuple(notes), snapshots, host)


def sequence_nbytes(states: Mapping[str, State], dtype: str, length: int, block_size: int) -> int:
    """Bytes of state that one sequence of `length` tokens holds between two steps."""
    total = 0
    for state in states.values():
        if isinstance(state, SlotState):
            total += state.nbytes_per_slot(dtype)
            continue
        blocks = -(-length // block_size)
        if state.window is not None:
            blocks = min(blocks, num_window_blocks(state.window, block_size))
        total += blocks * block_size * state.nbytes_per_token(dtype)
    return total


def sequence_rows(
    states: Mapping[str, State], dtype: str, block_size: int, lengths: Sequence[int] = LENGTHS
) -> list[tuple[int, int]]:
    """(context length, bytes of state of one such sequence), for `plait info`."""
    return [(n, sequence_nbytes(states, dtype, n, block_size)) for n in lengths]


def gib(nbytes: int) -> str:
    """Bytes for a reader: 1.5 GiB, 340 MiB, 12 KiB, 7 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes // size} {unit}"
    return f"{nbytes / 1024:.3g} KiB" if nbytes >= 1024 else f"{nbytes} byte{'s'[: nbytes != 1]}"


def _length(model: ModelFacts, config: EngineConfig) -> tuple[int, list[str]]:
    """The longest sequence that was requested, or the model's own; a note if it is shorter than that."""
    requested, longest = config.max_model_len, config.max_num_batched_tokens
    attends = model.both_ways or any(isinstance(state, PagedState) for state in model.states.values())
    if requested is not None and requested > model.max_len and attends:
        raise ConfigError(
            f"max_model_len: {requested} is more than the {model.max_len} tokens this model was made for; "
            "lower it, or change the model's config with --set if you know that it can do more"
        )
    length = model.max_len if requested is None else requested
    if model.causal or length <= longest:
        return length, []
    if requested is not None:
        raise ConfigError(
            f"max_model_len: {requested} is more than max_num_batched_tokens ({longest}), and this model "
            f"computes a sequence in one piece; set max_num_batched_tokens to {requested} too"
        )
    text = "this model computes a sequence in one piece of at most max_num_batched_tokens"
    return longest, [f"max_model_len is {longest} instead of {length}: {text}"]


class _StateMemory:
    """What the state of sequences of a model needs, as a function of their length."""

    def __init__(self, model: ModelFacts, config: EngineConfig) -> None:
        self.config, self.groups, self.tail = config, block_groups(model.states), model.tail
        slots = (s for s in model.states.values() if isinstance(s, SlotState))
        self.nbytes_per_slot = sum(s.nbytes_per_slot(model.dtype) for s in slots)
        # A group is bounded if a sequence's share of it has a bound however long it gets.
        self.bounded = {g.name for g in self.groups if g.window is not None and model.causal}
        self.nbytes_per_block: dict[str, int] = {}
        for group in self.groups:
            states = [state for name in group.members if isinstance(state := model.states[name], PagedState)]
            per_token = sum(state.nbytes_per_token(model.dtype) for state in states)
            self.nbytes_per_block[group.name] = config.block_size * per_token

    def num_blocks(self, group: BlockGroup, length: int) -> int:
        """Blocks of a group for all sequences at once, and the garbage block."""
        seqs, size = self.config.max_num_seqs, self.config.block_size
        full = seqs * -(-(length + self.tail) // size)
        if group.name not in self.bounded:
            return full + 1
        # In one step at most max_num_batched_tokens new tokens, of all sequences together, add to windows.
        new = -(-self.config.max_num_batched_tokens // size)
        return min(full, seqs * num_window_blocks(group.window or 0, size) + new) + 1

    def fixed_nbytes(self, length: int) -> int:
        """Bytes of windows and slots for `max_num_seqs` sequences."""
        total = (self.config.max_num_seqs + 1) * self.nbytes_per_slot
        bounded = (g for g in self.groups if g.name in self.bounded)
        return total + sum(self.num_blocks(g, length) * self.nbytes_per_block[g.name] for g in bounded)

    def one_sequence_nbytes(self, length: int) -> int:
        """The least memory in which one sequence of `length` can run, the fixed part included."""
        blocks = -(-(length + self.tail) // self.config.block_size) + 1
        growing = (nbytes for name, nbytes in self.nbytes_per_block.items() if name not in self.bounded)
        return self.fixed_nbytes(length) + blocks * sum(growing)

    def find_length(self, length: int, limit: int) -> int:
        """The longest sequence up to `length` that fits, in whole blocks if shorter; 0: none does."""
        if self.one_sequence_nbytes(length) <= limit:
            return length
        size = self.config.block_size
        counts = range(1, length // size + 1)
        return size * bisect_right(counts, limit, key=lambda n: self.one_sequence_nbytes(n * size))

    def groups_within(self, length: int, limit: int) -> tuple[tuple[GroupSize, ...], str | None]:
        """Every group's blocks: groups that grow with the context share the remaining memory equally."""
        left, per_block = limit - self.fixed_nbytes(length), self.nbytes_per_block
        growing = sum(nbytes for name, nbytes in per_block.items() if name not in self.bounded)
        sizes, note = [], None
        for group in self.groups:
            blocks = needed = self.num_blocks(group, length)
            if group.name not in self.bounded and (blocks := min(needed, left // growing)) < needed:
                size = self.config.block_size
                note = (
                    f"{(blocks - 1) * size} tokens fit into {gib(limit)} (--memory-limit), not the "
                    f"{(needed - 1) * size} that {self.config.max_num_seqs} longest sequences need: some may "
                    "have to wait, or be computed again"
                )
            sizes.append(GroupSize(group, blocks, per_block[group.name]))
        return tuple(sizes), note


def _too_small(state: _StateMemory, length: int, limit: int) -> str:
    needed, fixed = state.one_sequence_nbytes(length), state.fixed_nbytes(length)
    text = f"the state of one sequence of {length} tokens needs {gib(needed)}, and the limit is {gib(limit)}"
    if fixed:
        text += f"; {gib(fixed)} of it are windows and slots for {state.config.max_num_seqs} sequences"
    fits = state.find_length(length, limit)
    ways = [f"--max-model-len {fits} or less"] if fits else []
    ways += ["fewer --max-num-seqs"] if fixed and state.config.max_num_seqs > 1 else []
    return f"{text}. Start with {', or '.join([*ways, f'a --memory-limit of at least {needed}'])}"
