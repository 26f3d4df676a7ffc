"""The reported resume points are where a lookup would start, whatever was cached and evicted before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.state import prefix_tree
from plait.state.blocks import PrefixIndex, Snapshot, extend, root
from plait.state.prefix_tree import PrefixChanges, PrefixTree, StoredBlock

SIZE, DEPTH = 2, 4
REST = (9,)
KINDS: list[tuple[tuple[int | None, ...], bool]] = [
    ((None,), False),
    ((None, None), False),
    ((None,), True),
    ((), True),
    ((None, 5), False),
    ((3, None), True),
    ((4,), True),
]
# Prompts that begin alike: a path is the choice of one of two blocks at each depth.
PATHS = [tuple(int(bit) for bit in f"{n:04b}") for n in range(4)] + [(1, 0, 1, 1)]
SALTS = ["", "other"]


def tokens_of(path: Sequence[int]) -> list[int]:
    return [token for depth, bit in enumerate(path) for token in (10 * depth + bit, 1)]


def chain_of(path: Sequence[int], salt: str) -> list[bytes]:
    chain = [root(salt)]
    extend(chain, tokens_of(path), SIZE)
    return chain


class Reader:
    """A process that knows the reports alone."""

    def __init__(self) -> None:
        self.points: set[bytes] = set()
        self.blocks: dict[bytes, StoredBlock] = {}

    def take(self, tree: PrefixTree) -> list[PrefixChanges]:
        parts = list(tree.take())
        for part in parts:
            if part.begins:
                self.points.clear()
                self.blocks.clear()
            assert self.points >= set(part.removed)
            assert not self.points & set(part.added)
            self.points = (self.points | set(part.added)) - set(part.removed)
            for block in part.stored:
                assert block.name not in self.blocks
                assert (block.parent in self.blocks) if block.parent else block.root
                self.blocks[block.name] = block
            for name in part.dropped:
                assert not any(block.parent == name for block in self.blocks.values())
                del self.blocks[name]
        return parts


class World:
    """An index with a tree that listens to it, changed at random places."""

    def __init__(self, windows: tuple[int | None, ...], has_slots: bool) -> None:
        self.index = PrefixIndex(windows, SIZE, has_slots)
        self.tree = PrefixTree(windows, SIZE, has_slots=has_slots)
        self.index.listener = self.tree
        self.next = 1

    def change(self, what: str, path: tuple[int, ...], salt: str, depth: int, group: int) -> None:
        chain, index = chain_of(path, salt), self.index
        name, rest = chain[depth], REST if group else ()
        known = index.find(name, rest)
        if what == "block" and index.windows:
            group %= len(index.windows)
            self.tree.introduce(chain, tokens_of(path), depth)
            self.next += index.record(group, name, self.next)
        elif what == "evict" and index.windows:
            group %= len(index.windows)
            if (block := index.blocks[group].get(name)) is not None:
                index.forget(group, block)
        elif what == "snapshot" and known is None and index.has_slots:
            self.tree.introduce(chain, tokens_of(path), depth)
            index.add(Snapshot(name, rest, slot=self.next))
            self.next += 1
        elif what == "lose" and known is not None:
            index.remove(known)

    def resumable(self) -> set[bytes]:
        """By the index's own lookup: the whole blocks before the longest prefix that it finds."""
        found = set()
        for path in PATHS:
            for salt in SALTS:
                chain = chain_of(path, salt)
                for depth in range(1, DEPTH + 1):
                    for rest in (REST, ()):
                        tokens = [*tokens_of(path[:depth]), *rest]
                        hit = self.index.lookup(chain[: depth + 1], tokens, len(tokens))
                        if hit.length // SIZE == depth:
                            found.add(chain[depth])
        return found


CHANGES = st.tuples(
    st.sampled_from(["block", "block", "block", "snapshot", "evict", "lose", "take"]),
    st.sampled_from(PATHS),
    st.sampled_from(SALTS),
    st.integers(1, DEPTH),
    st.integers(0, 1),
)


@pytest.mark.parametrize(("windows", "has_slots"), KINDS)
@settings(max_examples=25, deadline=None)
@given(changes=st.lists(CHANGES, max_size=50))
def test_points_are_where_a_lookup_starts(
    windows: tuple[int | None, ...],
    has_slots: bool,
    changes: list[tuple[str, tuple[int, ...], str, int, int]],
) -> None:
    world, reader = World(windows, has_slots), Reader()
    for change in changes:
        if change[0] == "take":
            reader.take(world.tree)
        else:
            world.change(*change)
    reader.take(world.tree)
    expected = world.resumable()
    if any(windows):  # a snapshot inside a block may need one block less than is demanded
        assert reader.points <= expected
    else:
        assert reader.points == expected
    needed = {
        name for path in PATHS for salt in SALTS for name in covered(chain_of(path, salt), reader.points)
    }
    assert set(reader.blocks) == needed
    late = Reader()
    world.tree.report_anew()
    assert late.take(world.tree)[0].begins
    assert (late.points, late.blocks) == (reader.points, reader.blocks)


def covered(chain: list[bytes], points: set[bytes]) -> list[bytes]:
    """The blocks before the last point of a chain."""
    last = max((i for i in range(1, len(chain)) if chain[i] in points), default=0)
    return chain[1 : last + 1]


def test_blocks_bring_tokens_parent_and_root() -> None:
    world, reader, path = World((None,), False), Reader(), (0, 1, 0, 0)
    chain = chain_of(path, "salt")
    world.tree.introduce(chain, tokens_of(path), 2)
    for depth in (1, 2):
        world.index.record(0, chain[depth], depth)
    reader.take(world.tree)
    first = StoredBlock(chain[1], b"", (0, 1), root("salt"))
    assert reader.blocks == {chain[1]: first, chain[2]: StoredBlock(chain[2], chain[1], (11, 1))}


def test_nothing_is_kept_of_what_is_gone() -> None:
    world, reader, path = World((None,), True), Reader(), (0, 0, 0, 0)
    chain = chain_of(path, "")
    for depth in range(1, DEPTH + 1):
        world.change("block", path, "", depth, 0)
    world.change("snapshot", path, "", DEPTH, 0)
    assert reader.take(world.tree)
    assert reader.points == {chain[DEPTH]}
    for depth in range(1, DEPTH + 1):
        world.change("evict", path, "", depth, 0)
    world.change("lose", path, "", DEPTH, 0)
    reader.take(world.tree)
    assert (reader.points, reader.blocks, world.tree._nodes) == (set(), {}, {})
    world.tree.introduce(chain, tokens_of(path), DEPTH)  # a snapshot for which there was no slot
    reader.take(world.tree)
    assert not world.tree._nodes


def test_many_changes_are_reported_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_CHANGES", 3)
    world, reader = World((None,), False), Reader()
    chain, tokens = [root("")], list(range(20))
    extend(chain, tokens, SIZE)
    world.tree.introduce(chain, tokens, 10)
    for depth in range(1, 11):
        world.index.record(0, chain[depth], depth)
    assert [part.begins for part in reader.take(world.tree)] == [True, False, False, False]
    assert reader.points == set(chain[1:])
    assert not reader.take(world.tree)
    for depth in range(1, 11):
        world.index.forget(0, depth)
    assert len(reader.take(world.tree)) == 4
    assert not reader.points


def test_a_cleared_index_begins_anew() -> None:
    world, reader = World((None,), False), Reader()
    world.change("block", PATHS[0], "", 1, 0)
    reader.take(world.tree)
    world.tree.clear()
    assert [part.begins for part in reader.take(world.tree)] == [True]
    assert not reader.points
