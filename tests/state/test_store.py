"""Memory moves byte for byte, whatever its kind, dtype and device, and as a list of steps says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import EngineError
from plait.memory import PagedState, SlotState, State, block_groups
from plait.state.store import DeviceRows, StateStore
from plait.state.swap import HostPool

BLOCKS, SLOTS, SIZE = 5, 4, 4
PAGED = PagedState({"k": (2, 3), "v": (2, 5)}, dtype="bfloat16")
WINDOW, LATENT = PagedState({"k": (3,), "v": (3,)}, window=6), PagedState({"latent": (7,)})
SLOT = SlotState({"conv": ((3, 2), "model"), "ssm": ((2, 2, 3), "float32"), "angle": ((), "float32")})
KINDS: dict[str, Mapping[str, State]] = {
    "all": {"a": WINDOW, "b": SLOT, "c": PAGED, "d": LATENT, "e": SLOT},
    "paged": {"a": PAGED, "b": WINDOW},
    "codes": {"a": PagedState({"k": (2, 10), "v": (2, 10)}, dtype="int8"), "b": WINDOW, "c": SLOT},
    "slots": {"a": SLOT, "b": SlotState({"conv": ((0, 4), "model")})},
    "none": {},
}
# Copied row by row as on a CPU, or many rows at once as on a GPU.
WAYS = ["rows", "at once", *(["cuda"] if torch.cuda.is_available() else [])]


def store_of(states: Mapping[str, State], way: str = "rows") -> StateStore:
    device = torch.device("cuda" if way == "cuda" else "cpu")
    groups = {group.name: BLOCKS for group in block_groups(states)}
    slots = SLOTS if any(isinstance(state, SlotState) for state in states.values()) else 0
    store = StateStore(states, groups, slots, SIZE, device, torch.float32)
    if way == "at once":
        store._copy_on(device, HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), segment=512))
    noise = np.random.default_rng(0)
    for name in states:
        for tensor in store[name].values():  # any bits, those that are no number too
            content = torch.from_numpy(noise.integers(0, 256, tensor.nbytes, np.uint8))
            tensor.view(-1).view(torch.uint8).copy_(content)
    return store


Contents = dict[tuple[str, str], np.ndarray[Any, np.dtype[np.uint8]]]


def contents(store: StateStore, states: Mapping[str, State]) -> Contents:
    """Every tensor's bytes, [rows, bytes]."""
    found: Contents = {}
    for name in states:
        for key, tensor in store[name].items():
            flat = tensor.cpu().reshape(tensor.shape[0], -1).view(torch.uint8)
            found[name, key] = flat.numpy().copy()
    return found


class Mirror:
    """The same moves on arrays, in the plainest way: a dictionary of what is where."""

    def __init__(self, store: StateStore, states: Mapping[str, State]) -> None:
        self.arrays = contents(store, states)
        self.groups = [list(group.members) for group in block_groups(states)]
        self.slots = [name for name, state in states.items() if isinstance(state, SlotState)]
        self.saved: dict[int, tuple[Contents, Any, bool]] = {}

    def of(self, names: list[str]) -> list[Any]:
        return [array for (name, _), array in self.arrays.items() if name in names]

    def copy_rows(self, group: int, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for array in self.of([*self.groups, self.slots][group]):
                array[target] = array[source].copy()

    def zero_slots(self, slots: list[int]) -> None:
        for array in self.of(self.slots):
            array[slots] = 0

    def save(self, handle: int, blocks: list[list[int]], slot: int) -> None:
        everything = {key: array.copy() for key, array in self.arrays.items()}
        self.saved[handle] = everything, (blocks, slot), bool(slot)

    def load(self, handle: int, blocks: list[list[int]], slot: int) -> None:
        """Nothing, where the real one must refuse."""
        before, (tables, saved_slot), _ = self.saved[handle]
        moves = [*zip(self.groups, tables, blocks, strict=True)]
        moves.append((self.slots, [saved_slot][: bool(slot)], [slot][: bool(slot)]))
        for names, sources, targets in moves:
            for key in before:
                if key[0] in names:
                    for source, target in zip(sources, targets, strict=True):
                        self.arrays[key][target] = before[key][source]

    def drop(self, handle: int) -> None:
        self.saved.pop(handle, None)

    @property
    def nbytes_saved(self) -> int:
        total = 0
        for _, (tables, slot), _ in self.saved.values():
            for names, table in zip(self.groups, tables, strict=True):
                total += len(table) * sum(array.shape[1] for array in self.of(names))
            total += bool(slot) * sum(array.shape[1] for array in self.of(self.slots))
        return total


def walked(data: st.DataObject, mirror: Mirror, store: StateStore) -> None:
    """One random move, on both."""
    index = {"block": st.integers(0, BLOCKS - 1), "slot": st.integers(0, SLOTS - 1)}
    pairs = {key: st.lists(st.tuples(one, one), max_size=6) for key, one in index.items()}
    tables = [st.lists(index["block"], max_size=BLOCKS, unique=True) for _ in mirror.groups]
    slot = st.integers(0, SLOTS - 1) if mirror.slots else st.just(0)
    handles = st.integers(1, 3)
    what = data.draw(st.sampled_from(["slots", "blocks", "zero", "save", "load", "drop"]))
    arguments: tuple[Any, ...]
    match what:
        case "slots" if mirror.slots:
            name, arguments = "copy_rows", (-1, data.draw(pairs["slot"]))
        case "blocks" if mirror.groups:
            group = data.draw(st.integers(0, len(mirror.groups) - 1))
            name, arguments = "copy_rows", (group, data.draw(pairs["block"]))
        case "zero" if mirror.slots:
            name, arguments = "zero_slots", (data.draw(st.lists(index["slot"], max_size=3)),)
        case "load" if mirror.saved:
            handle = data.draw(st.sampled_from(sorted(mirror.saved)))
            _, (saved, had_slot), _ = mirror.saved[handle]
            blocks = [data.draw(st.permutations(range(BLOCKS)))[: len(table)] for table in saved]
            name, arguments = (
                "load",
                (handle, blocks, data.draw(st.integers(1, SLOTS - 1)) if had_slot else 0),
            )
        case "drop":
            name, arguments = "drop", (data.draw(handles),)
        case _:
            name, arguments = "save", (data.draw(handles), [data.draw(t) for t in tables], data.draw(slot))
    for one in (mirror, store):
        getattr(one, name)(*arguments)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), steps=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_random_moves_do_what_they_do_to_plain_arrays(
    way: str, kind: str, data: st.DataObject, steps: int
) -> None:
    states = KINDS[kind]
    store = store_of(states, way)
    mirror = Mirror(store, states)
    for _ in range(steps):
        walked(data, mirror, store)
        assert store.nbytes_saved == mirror.nbytes_saved
    found = contents(store, states)
    assert found.keys() == mirror.arrays.keys()
    for key, array in mirror.arrays.items():
        assert np.array_equal(found[key], array), key


def test_a_saved_copy_does_not_follow_what_is_written_later() -> None:
    states = KINDS["all"]
    store = store_of(states)
    before = contents(store, states)
    store.save(7, [[3], [1, 2]], 2)
    store.zero_slots([2])
    store.copy_rows(0, [(1, 3)])
    store.load(7, [[3], [1, 2]], 2)
    after = contents(store, states)
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_saved_memory_is_counted_and_freed() -> None:
    states = KINDS["all"]
    store = store_of(states)
    full, window = SIZE * (2 * (6 + 10) + 4 * 7), SIZE * 4 * 6
    slot = 2 * 4 * (6 + 12 + 1)
    assert store.nbytes == BLOCKS * (full + window) + SLOTS * slot
    store.save(1, [[1, 2], [3]], 0)
    assert store.nbytes_saved == 2 * full + window
    store.save(2, [[], []], 1)
    assert store.nbytes_saved == 2 * full + window + slot
    store.save(1, [[4], []], 0)  # over what was there
    assert store.nbytes_saved == full + slot
    for handle in (1, 2, 2):
        store.drop(handle)
    assert store.nbytes_saved == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.load(9, [[1], []], 1), "nothing is saved as 9"),
        (lambda s: s.load(1, [[1], []], 1), r"\(2, 1\) blocks and 1 slots are saved as 1, not the \(1, 0\)"),
        (lambda s: s.load(1, [[1, 2], [3]], 0), "not the .* blocks and 0 slots that are to be loaded"),
        (lambda s: s.load(1, [[1, 2]], 1), "blocks of 1 groups are named and the model has 2"),
        (lambda s: s.save(2, [[1]], 1), "blocks of 1 groups are named and the model has 2"),
    ],
)
def test_a_copy_that_is_not_there_is_refused(act: Callable[[StateStore], None], message: str) -> None:
    states = KINDS["all"]
    store = store_of(states)
    store.save(1, [[1, 2], [3]], 1)
    before = contents(store, states)
    with pytest.raises(EngineError, match=message):
        act(store)
    after = contents(store, states)
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_saved_copy_can_be_loaded_more_than_once() -> None:
    states = KINDS["slots"]
    store = store_of(states)
    before = contents(store, states)
    store.save(1, [], 1)
    for slot in (2, 3):
        store.load(1, [], slot)
    after = contents(store, states)
    for key in before:
        assert all(np.array_equal(before[key][1], after[key][slot]) for slot in (1, 2, 3))


def test_copies_that_follow_from_each_other_are_made_in_turn() -> None:
    tensor = torch.arange(4.0)[:, None].clone()
    rows = DeviceRows([tensor])
    rows.copy([(1, 2), (2, 3), (0, 1), (3, 0), (1, 3), (2, 2)])
    assert tensor[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
