"""In random lives of sequences the reported resume points are those of the index; none is missed."""

from __future__ import annotations

import random

import pytest

from plait.state.blocks import Snapshot, Tokens
from plait.state.prefix_tree import PrefixNode, PrefixTree
from tests.schedule.walk import SHAPES, Size, World, wander


def path_of(node: PrefixNode) -> tuple[list[bytes], Tokens]:
    """The names of the whole blocks up to a node, the salt's first, and their tokens."""
    names, tokens = [node.name], list(node.tokens)
    while (parent := node.parent) is not None:
        names, tokens = [parent.name, *names], [*parent.tokens, *tokens]
        node = parent
    return names, tokens


def check(world: World, tree: PrefixTree, points: set[bytes]) -> None:
    index = world.memory.pools.index
    has_windows = any(window is not None for window in index.windows)
    cached = {*index.snapshots, *(name for blocks in index.blocks for name in blocks)}
    assert cached <= tree._nodes.keys()
    for node in tree._nodes.values():
        chain, tokens = path_of(node)
        snapshots = index.snapshots.get(node.name, []) if index.has_slots else [Snapshot(node.name, ())]
        ends = [[*tokens, *snapshot.rest] for snapshot in snapshots]
        lengths = [index.lookup(chain, end, len(end)).length for end in ends]
        is_found = any(length >= len(tokens) > 0 for length in lengths)
        if has_windows:
            assert is_found or node.name not in points
        else:
            assert is_found == (node.name in points)
    assert points <= tree._nodes.keys()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_points_follow_the_index_through_random_lives(shape: str) -> None:
    rng, num_points = random.Random(shape), 0
    world = World(SHAPES[shape], Size(num_blocks=24, num_spare_slots=4, host_nbytes=1000))
    tree = world.memory.follow_prefixes()
    assert tree is not None
    points: set[bytes] = set()
    for _ in range(12):
        wander(world, rng, 20, busy=0.3, faults=0.02)
        for part in tree.take():
            points = set() if part.begins else points
            points = (points | set(part.added)) - set(part.removed)
        num_points += len(points)
        check(world, tree, points)
    assert num_points


def test_a_model_that_is_not_causal_has_nothing_to_follow() -> None:
    assert World(SHAPES["full"], Size(causal=False)).memory.follow_prefixes() is None
