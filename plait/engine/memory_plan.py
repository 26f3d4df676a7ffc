"""Sizes the memory of running sequences, KV cache blocks and slots: by need, under a limit. Arithmetic only.

Windows and slots are bounded per sequence and sized for `max_num_seqs`; full attention gets what
`max_num_seqs` sequences of `max_model_len` tokens need, or what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.config import EngineConfig
from plait.errors import ConfigError, OutOfMemory
from plait.memory import BlockGroup, PagedState, SlotState, State, block_groups
from plait.schedule.allocation import Allocation, num_window_blocks
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler, SchedulerLimits

DEFAULT_SHARE = 0.5  # of the memory that is free when the weights are loaded
SNAPSHOT_SHARE = 0.25  # of the limit, at most, for snapshots of recurrent state
SNAPSHOTS_PER_SEQ = 2  # one at the prompt boundary, one at the end of the reply
HOST_SHARE = 0.25  # of free host memory, at most, for what has to leave the device
LENGTHS = (1024, 8192, 32768, 131072)  # at which `plait info` shows what a sequence costs


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One block group: `num_blocks` with the garbage block, bytes of one block over all its mixers."""

    group: BlockGroup
    num_blocks: int
    nbytes_per_block: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.nbytes_per_block


@dataclass(frozen=True, slots=True)
class Sizing:
    """The state memory of an engine. `num_slots` holds the garbage slot; 0: no mixer has recurrent state.

    `num_snapshots` of the slots are beyond what running sequences need. `host_nbytes`: the most host memory
    for sequences and snapshots that leave the device, taken when needed. `notes`: what was made smaller than
    a default, and why, to be shown at startup.
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
            table.append(("state of fixed size", f"{running - 1} slots", slots))
            table.append(("snapshots of it", f"{self.num_snapshots} slots", snapshots))
        total = "total once all state is in use" if is_lazy else "total"
        return [*table, (total, "", weights_nbytes + self.nbytes)]

    def scheduler(self, config: EngineConfig, *, causal: bool, num_steps: int = 1) -> Scheduler:
        """A scheduler over exactly this memory. `num_steps`: the most decode steps of one plan."""
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            max_model_len=self.max_model_len,
            max_step_s=config.max_step_ms / 1000 or None,
            num_steps=num_steps,
            causal=causal,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What sizing must know about a model: its own longest sequence, the dtype it computes in, its states."""

    states: Mapping[str, State]
    max_len: int
    dtype: str
    causal: bool = True


def size_state(
    model: ModelFacts,
    config: EngineConfig,
    *,
    free_memory: int,
    free_host: int | None = None,
    total_memory: int | None = None,
) -> Sizing:
    """Size the memory of a model's state. `free_memory`: bytes free on the device once the weights are there.

    `free_host`: bytes free on the host, if that is another; `total_memory`: all of the device, if known.
    The limit is `config.memory_limit`, else half of `free_memory`. Raises ConfigError if the model cannot do
    the requested `max_model_len` or the device has less than `memory_limit`. Raises OutOfMemory with both
    numbers if not one such sequence fits. A length that no option set is made shorter instead, with a note.
    """
    if config.memory_limit is not None and total_memory is not None and config.memory_limit > total_memory:
        raise ConfigError(
            f"memory_limit: {config.memory_limit} bytes ({gib(config.memory_limit)}) are more than the "
            f"{gib(total_memory)} of memory that there are; give at most {total_memory}, or none"
        )
    limit = config.memory_limit or int(free_memory * DEFAULT_SHARE)
    asked, notes = _length(model, config)
    length = _fit_length(model, config, asked, limit)
    if length < asked:
        if config.max_model_len is not None or length < 1:
            raise OutOfMemory(_too_small(model, config, asked, limit))
        notes.append(
            f"max_model_len is {length} instead of {asked}: the state of a longer sequence does not fit into "
            f"{gib(limit)} (--memory-limit)"
        )
    nbytes, snapshots = _nbytes_per_slot(model), _num_snapshots(model, config, length, limit)
    groups, note = _groups(model, config, length, limit - snapshots * nbytes)
    notes += [note] if note else []
    num_slots = config.max_num_seqs + 1 + snapshots if nbytes else 0
    host = _host_nbytes(model, config, length, free_memory if free_host is None else free_host)
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
    """Bytes for a reader: 1.5 GiB, 340 MiB, 12 KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes // size} {unit}"
    return f"{nbytes / 1024:.3g} KiB"


def _length(model: ModelFacts, config: EngineConfig) -> tuple[int, list[str]]:
    """The longest sequence that was requested, or the model's own."""
    asked, has_pages = config.max_model_len, any(isinstance(s, PagedState) for s in model.states.values())
    if asked is not None and asked > model.max_len and has_pages:
        raise ConfigError(
            f"max_model_len: {asked} is more than the {model.max_len} tokens this model was made for; "
            "lower it, or change the model's config with --set if you know that it can do more"
        )
    length = model.max_len if asked is None else asked
    longest = config.max_num_batched_tokens
    if model.causal or length <= longest:
        return length, []
    if asked is not None:
        raise ConfigError(
            f"max_model_len: {asked} is more than max_num_batched_tokens ({longest}), and this model "
            f"computes a sequence in one piece; set max_num_batched_tokens to {asked} too"
        )
    return longest, [
        f"max_model_len is {longest} instead of {length}: this model computes a sequence in one piece of at "
        "most max_num_batched_tokens"
    ]


def _num_snapshots(model: ModelFacts, config: EngineConfig, length: int, limit: int) -> int:
    """The number of slots for snapshots, in the memory that one of the longest sequences leaves."""
    nbytes = _nbytes_per_slot(model)
    if not nbytes or not model.causal:
        return 0
    left = min(limit - _one_sequence_nbytes(model, config, length), int(limit * SNAPSHOT_SHARE))
    return min(SNAPSHOTS_PER_SEQ * config.max_num_seqs, max(left, 0) // nbytes)


def _host_nbytes(model: ModelFacts, config: EngineConfig, length: int, free: int) -> int:
    """Bytes of host memory for swapping: what all sequences need, at most a share of free memory."""
    if config.swap_memory is not None:
        return config.swap_memory
    each = sequence_nbytes(model.states, model.dtype, length, config.block_size)
    return min(config.max_num_seqs * each, int(free * HOST_SHARE))


def _groups(
    model: ModelFacts, config: EngineConfig, length: int, limit: int
) -> tuple[tuple[GroupSize, ...], str | None]:
    """Every group's blocks: groups that grow with the context share the remaining memory equally."""
    groups = block_groups(model.states)
    per_block = {g.name: _nbytes_per_block(model, g, config.block_size) for g in groups}
    left = limit - _fixed_nbytes(model, config, length)
    growing = [g for g in groups if not _is_bounded(model, g)]
    affordable = left // sum(per_block[g.name] for g in growing) if growing else 0
    sizes, note = [], None
    for group in groups:
        blocks = wanted = _num_blocks(model, group, config, length)
        if group in growing and (blocks := min(blocks, affordable)) < wanted:
            note = _fewer(blocks, wanted, config, limit)
        sizes.append(GroupSize(group, blocks, per_block[group.name]))
    return tuple(sizes), note


def _num_blocks(model: ModelFacts, group: BlockGroup, config: EngineConfig, length: int) -> int:
    """Blocks of a group for all sequences at once, and the garbage block."""
    seqs, size = config.max_num_seqs, config.block_size
    full = seqs * -(-length // size)
    if not _is_bounded(model, group):
        return full + 1
    # In one step at most max_num_batched_tokens new tokens, of all sequences together, add to the windows.
    new = -(-config.max_num_batched_tokens // size)
    return min(full, seqs * num_window_blocks(group.window or 0, size) + new) + 1


def _is_bounded(model: ModelFacts, group: BlockGroup) -> bool:
    """Whether a sequence's share of this group has a bound however long it gets."""
    return group.window is not None and model.causal


def _nbytes_per_block(model: ModelFacts, group: BlockGroup, block_size: int) -> int:
    states = (model.states[name] for name in group.members)
    per_token = sum(s.nbytes_per_token(model.dtype) for s in states if isinstance(s, PagedState))
    return per_token * block_size


def _nbytes_per_slot(model: ModelFacts) -> int:
    states = model.states.values()
    return sum(s.nbytes_per_slot(model.dtype) for s in states if isinstance(s, SlotState))


def _fixed_nbytes(model: ModelFacts, config: EngineConfig, length: int) -> int:
    """Bytes of windows and slots for `max_num_seqs` sequences."""
    total = (config.max_num_seqs + 1) * _nbytes_per_slot(model)
    for group in block_groups(model.states):
        if _is_bounded(model, group):
            blocks = _num_blocks(model, group, config, length)
            total += blocks * _nbytes_per_block(model, group, config.block_size)
    return total


def _one_sequence_nbytes(model: ModelFacts, config: EngineConfig, length: int) -> int:
    """The least memory in which one sequence of `length` can run, the fixed part included."""
    total = _fixed_nbytes(model, config, length)
    for group in block_groups(model.states):
        if not _is_bounded(model, group):
            blocks = -(-length // config.block_size) + 1
            total += blocks * _nbytes_per_block(model, group, config.block_size)
    return total


def _fit_length(model: ModelFacts, config: EngineConfig, length: int, limit: int) -> int:
    """The longest sequence up to `length` that fits, in whole blocks if shorter; 0: none does."""
    if _one_sequence_nbytes(model, config, length) <= limit:
        return length
    low, high = 0, length // config.block_size  # in blocks: `low` fits, `high` + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        if _one_sequence_nbytes(model, config, middle * config.block_size) <= limit:
            low = middle
        else:
            high = middle - 1
    return low * config.block_size


def _too_small(model: ModelFacts, config: EngineConfig, length: int, limit: int) -> str:
    needed, fixed = _one_sequence_nbytes(model, config, length), _fixed_nbytes(model, config, length)
    text = f"the state of one sequence of {length} tokens needs {gib(needed)}, and the limit is {gib(limit)}"
    if fixed:
        text += f"; {gib(fixed)} of it are windows and slots for {config.max_num_seqs} sequences"
    fits = _fit_length(model, config, length, limit)
    ways = [f"--max-model-len {fits} or less"] if fits else []
    ways += ["fewer --max-num-seqs"] if fixed and config.max_num_seqs > 1 else []
    return f"{text}. Start with {', or '.join([*ways, f'a --memory-limit of at least {needed}'])}"


def _fewer(blocks: int, wanted: int, config: EngineConfig, limit: int) -> str:
    tokens = (blocks - 1) * config.block_size
    return (
        f"{tokens} tokens fit into {gib(limit)} (--memory-limit), not the "
        f"{(wanted - 1) * config.block_size} that {config.max_num_seqs} longest sequences need: some may "
        "have to wait, or be computed again"
    )
