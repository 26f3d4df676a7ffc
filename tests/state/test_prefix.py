from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.errors import OutOfBlocks
from plait.state.blocks import BlockPool, Hit, PrefixIndex, Snapshot, extend, root

BLOCK = 4
Tokens = tuple[int, ...]


def chain_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    chain = [root(salt)]
    extend(chain, tokens, BLOCK)
    return chain


def lookup(index: PrefixIndex, tokens: Sequence[int], limit: int | None = None, salt: str = "") -> Hit:
    return index.lookup(chain_of(tokens, salt), tokens, len(tokens) - 1 if limit is None else limit)


def store(index: PrefixIndex, tokens: Sequence[int], first_block: int = 1, salt: str = "") -> None:
    """All whole blocks of these tokens, in every group, in blocks from `first_block` on."""
    for i, name in enumerate(chain_of(tokens, salt)[1:]):
        index.saw(name)
        for group in range(len(index.windows)):
            assert index.record(group, name, first_block + i)


def snapshot_at(tokens: Sequence[int], **places: object) -> Snapshot:
    whole = len(tokens) // BLOCK
    return Snapshot(chain_of(tokens)[whole], tuple(tokens[whole * BLOCK :]), **places)  # type: ignore[arg-type]


def full() -> PrefixIndex:
    return PrefixIndex((None,), BLOCK, has_slots=False)


def test_a_hash_names_the_whole_prefix_and_not_only_its_own_block() -> None:
    one, two = chain_of([1, 2, 3, 4, 5, 6, 7, 8]), chain_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len({*one, *two}) == 5  # they share the root alone
    assert chain_of([1, 2, 3, 4, 5]) == one[:2]


def test_a_chain_grows_with_its_tokens_to_what_it_would_have_been_at_once() -> None:
    tokens, chain = list(range(19)), [root("s")]
    for end in (0, 3, 4, 5, 11, 11, 19):
        extend(chain, tokens[:end], BLOCK)
        assert len(chain) == 1 + end // BLOCK
    assert chain == chain_of(tokens, "s")


def test_block_limits_are_part_of_a_hash() -> None:
    """Tokens 1, 23 and 12, 3 must not look the same, nor large ids like small ones."""
    assert chain_of([1, 23, 0, 0]) != chain_of([12, 3, 0, 0])
    assert chain_of([1, 0, 0, 0]) != chain_of([1 + 256, 0, 0, 0]) != chain_of([1 + 2**32, 0, 0, 0])


def test_full_blocks_are_shared_up_to_the_last_token_but_one() -> None:
    index = full()
    store(index, range(12))
    assert lookup(index, range(30)).blocks == ((1, 2, 3),)
    assert lookup(index, range(13)).length == 12
    assert lookup(index, range(12)) == Hit(8, ((1, 2),), None, "hit", 8)  # one token must be computed
    assert lookup(index, [*range(6), 99, *range(7, 30)]).length == 4


def test_another_salt_shares_nothing() -> None:
    index = full()
    store(index, range(12), salt="mine")
    assert lookup(index, range(13), salt="mine").length == 12
    assert (lookup(index, range(13)).length, lookup(index, range(13), salt="yours").cause) == (0, "new")


def test_a_block_behind_a_hole_is_no_hit() -> None:
    index = full()
    store(index, range(16))
    index.forget(0, 2)
    assert lookup(index, range(17)) == Hit(4, ((1,),), None, "hit", 16)


def test_the_first_block_of_a_name_stays_and_a_second_one_is_refused() -> None:
    index = full()
    name = chain_of(range(4))[1]
    assert index.record(0, name, 3)
    assert index.record(0, name, 3)
    assert not index.record(0, name, 4)
    assert lookup(index, range(5)).blocks == ((3,),)


@pytest.mark.parametrize(("window", "first"), [(1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0), (100, 0)])
def test_a_window_needs_its_last_tokens_alone(window: int, first: int) -> None:
    """A query at 12 reads the `window` - 1 tokens before it; what is further back may be gone."""
    index = PrefixIndex((window,), BLOCK, has_slots=False)
    store(index, range(12))
    for block in range(1, first + 1):
        index.forget(0, block)
    assert lookup(index, range(13)).blocks == ((*[0] * first, *range(first + 1, 4)),)
    if first < 3:
        index.forget(0, first + 1)
        assert lookup(index, range(13)).length < 12


def test_a_hole_in_the_window_falls_back_to_a_shorter_prefix_that_all_groups_have() -> None:
    index = PrefixIndex((None, 4), BLOCK, has_slots=False)
    store(index, range(16))
    index.forget(1, 4)
    assert lookup(index, range(17)) == Hit(12, ((1, 2, 3), (0, 0, 3)), None, "hit", 16)
    index.forget(1, 1)
    index.forget(1, 2)
    index.forget(1, 3)
    assert lookup(index, range(17)).cause == "window"


def test_with_slots_only_a_snapshot_can_be_started_from() -> None:
    index = PrefixIndex((None,), BLOCK, has_slots=True)
    store(index, range(16))
    assert lookup(index, range(17)) == Hit(0, ((),), None, "no_snapshot", 16)
    taken = snapshot_at(range(8), slot=5)
    index.add(taken)
    assert lookup(index, range(17)) == Hit(8, ((1, 2),), taken, "hit", 16)
    index.forget(0, 2)
    assert lookup(index, range(17)).length == 0


def test_a_snapshot_inside_a_block_is_found_by_the_tokens_that_follow() -> None:
    index = PrefixIndex((None,), BLOCK, has_slots=True)
    store(index, range(8))
    short, long = snapshot_at(range(9), slot=1, blocks=(7,)), snapshot_at(range(11), slot=2, blocks=(8,))
    index.add(short)
    index.add(long)
    assert lookup(index, range(12)).snapshot is long
    assert lookup(index, range(11)).snapshot is short  # one token must be computed
    assert lookup(index, [*range(9), 99, 99]).snapshot is short
    assert lookup(index, [*range(8), 99, 99]).length == 0
    assert index.find(long.parent, long.rest) is long
    index.check()


def test_a_model_without_slots_hits_inside_a_block_only_where_one_was_copied() -> None:
    index = full()
    store(index, range(8))
    forked = snapshot_at(range(10), blocks=(9,))
    index.add(forked)
    assert lookup(index, range(12)) == Hit(10, ((1, 2),), forked, "hit", 10)
    assert index.forget(0, 9) is forked
    index.remove(forked)
    assert lookup(index, range(12)).length == 8
    index.check()


def test_state_without_blocks_needs_nothing_but_its_snapshot() -> None:
    index = PrefixIndex((), BLOCK, has_slots=True)
    index.add(taken := snapshot_at(range(6), slot=3))
    assert lookup(index, range(9)) == Hit(6, (), taken, "hit", 6)


def test_a_snapshot_that_moves_to_the_host_leaves_its_slot_and_is_still_found() -> None:
    index = PrefixIndex((), BLOCK, has_slots=True)
    index.add(taken := snapshot_at(range(8), slot=3))
    assert index.in_slot(3) is taken
    index.move_to_host(taken, 17)
    assert (index.in_slot(3), index.kept_slots) == (None, set())
    hit = lookup(index, range(9)).snapshot
    assert hit is taken
    assert (taken.slot, taken.handle) == (0, 17)
    index.check()
    index.remove(taken)
    assert lookup(index, range(9)).length == 0


def test_why_nothing_was_found() -> None:
    index = full()
    assert lookup(index, range(3)).cause == "short"
    assert lookup(index, range(9)).cause == "new"
    store(index, range(8))
    index.forget(0, 1)
    assert lookup(index, range(9)).cause == "evicted"


def test_lost_prefix_differs_from_a_new_one_by_how_much_of_it_was_seen() -> None:
    index = PrefixIndex((None,), BLOCK, has_slots=True)
    store(index, range(12))
    hit = lookup(index, [*range(8), *range(90, 99)])
    assert (hit.length, hit.seen) == (0, 8)


@pytest.mark.parametrize("damage", ["_hash_of", "_by_slot", "_snapshot_of"])
def test_check_fails_when_the_maps_disagree(damage: str) -> None:
    index = PrefixIndex((None,), BLOCK, has_slots=True)
    store(index, range(8))
    index.add(snapshot_at(range(10), slot=2, blocks=(6,)))
    index.check()
    lost = getattr(index, damage)
    (lost[0] if isinstance(lost, list) else lost).clear()
    with pytest.raises(AssertionError):
        index.check()


class IndexMachine(RuleBasedStateMachine):
    """An index compared with dictionaries from whole prefixes to places, and hits found by brute force."""

    @initialize(
        windows=st.sampled_from([(None,), (None, 3), (None, 6), (5,), (3, 7), (), (None, None)]),
        has_slots=st.booleans(),
    )
    def start(self, windows: tuple[int | None, ...], has_slots: bool) -> None:
        self.windows, self.has_slots = windows, has_slots or not windows
        self.index = PrefixIndex(windows, BLOCK, self.has_slots)
        self.stored: list[dict[Tokens, int]] = [{} for _ in windows]
        self.taken: dict[Tokens, Snapshot] = {}
        self.last = 0

    def place(self) -> int:
        self.last += 1
        return self.last

    tokens = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=18).map(tuple)

    @rule(tokens=tokens)
    def compute(self, tokens: Tokens) -> None:
        """A sequence has computed all its blocks, and those that the index does not have are recorded."""
        for i, name in enumerate(chain_of(tokens)[1:]):
            for group, stored in enumerate(self.stored):
                prefix, block = tokens[: (i + 1) * BLOCK], self.place()
                assert self.index.record(group, name, block) == (prefix not in stored)
                stored.setdefault(prefix, block)

    @rule(tokens=tokens)
    def take_snapshot(self, tokens: Tokens) -> None:
        rest = len(tokens) % BLOCK
        if tokens in self.taken or not (rest or self.has_slots):
            return
        self.taken[tokens] = snapshot_at(
            tokens,
            slot=self.place() if self.has_slots else 0,
            blocks=tuple(self.place() for _ in self.windows) if rest else (),
        )
        self.index.add(self.taken[tokens])

    @precondition(lambda self: any(self.stored))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([g for g, stored in enumerate(self.stored) if stored]))
        prefix = data.draw(st.sampled_from(sorted(self.stored[group])))
        assert self.index.forget(group, self.stored[group].pop(prefix)) is None

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), to_host=st.booleans())
    def lose_snapshot(self, data: st.DataObject, to_host: bool) -> None:
        prefix = data.draw(st.sampled_from(sorted(self.taken)))
        snapshot = self.taken[prefix]
        if to_host and snapshot.slot:
            self.index.move_to_host(snapshot, self.place())
            return
        for group, block in enumerate(snapshot.blocks):
            assert self.index.forget(group, block) is snapshot
        self.index.remove(self.taken.pop(prefix))

    @rule(tokens=tokens)
    def look_up(self, tokens: Tokens) -> None:
        hit, expected = lookup(self.index, tokens), 0
        for length in range(1, len(tokens)):
            if self.is_known(tokens[:length]):
                expected = length
        assert hit.length == expected
        assert (hit.cause == "hit") == (expected > 0)
        if expected:
            assert hit.snapshot is self.taken.get(tokens[:expected])
            assert hit.blocks == tuple(self.table(g, tokens[:expected]) for g in range(len(self.windows)))

    def table(self, group: int, prefix: Tokens) -> Tokens:
        """The blocks that a query behind this prefix reads in a group; -1 where one is missing."""
        window = self.windows[group] or len(prefix) + 1
        first = max(len(prefix) - window + 1, 0) // BLOCK
        ends = range(BLOCK, len(prefix) + 1, BLOCK)
        return tuple(self.stored[group].get(prefix[:end], -1) if end > first * BLOCK else 0 for end in ends)

    def is_known(self, prefix: Tokens) -> bool:
        if (self.has_slots or len(prefix) % BLOCK) and prefix not in self.taken:
            return False
        return not any(-1 in self.table(group, prefix) for group in range(len(self.windows)))

    @invariant()
    def the_maps_agree(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        for group, stored in enumerate(self.stored):
            partly = {s.blocks[group] for s in self.taken.values() if s.blocks}
            assert self.index.list_kept(group) == {*stored.values()} | partly


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_every_hit_returns_what_was_stored(seed: int) -> None:
    """In a small pool that evicts, sequences are given what they would have written themselves."""
    rng = random.Random(seed)
    index = full()
    pool = BlockPool(16, lambda block: index.forget(0, block))
    written: dict[int, Tokens] = {}
    lives: list[list[int]] = []
    hits = refused = 0
    for _ in range(2000):
        if lives and rng.random() < 0.5:
            pool.give(reversed(lives.pop(rng.randrange(len(lives)))))
        tokens = tuple(rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 24)))
        hit, chain = lookup(index, tokens), chain_of(tokens)
        table = list(hit.blocks[0])
        assert [written[block] for block in table] == [
            tokens[:n] for n in range(BLOCK, hit.length + 1, BLOCK)
        ]
        pool.ref(table)
        try:
            table += pool.take(len(chain) - 1 - len(table))
        except OutOfBlocks:
            pool.give(table)
            refused += 1
            continue
        for i in range(hit.length // BLOCK, len(chain) - 1):
            written[table[i]] = tokens[: (i + 1) * BLOCK]
            if index.record(0, chain[i + 1], table[i]):
                pool.keep(table[i])
        lives.append(table)
        hits += hit.length > 0
        pool.check()
        index.check()
        held = {block for life in lives for block in life}
        assert all(pool.refs(block) == sum(block in life for life in lives) for block in range(1, 16))
        assert pool.num_free + pool.num_cached == 15 - len(held)
    assert hits > 300
    assert refused > 10
