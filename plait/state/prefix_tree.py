"""What a prefix cache can resume, as changes that other processes read. Integers only, no torch.

`PrefixTree` follows a `PrefixIndex` and keeps its prefixes as a tree of whole blocks. A *resume point* is a
block behind which a sequence can start: with paged state alone every block, with recurrent state only where a
snapshot is. All blocks before it must be there, too, of windowed groups those in the window. A snapshot
inside a block counts for the blocks before it.

    root ── b1 ── b2 ── b3 ── b4          a snapshot behind b2 and one in b4, behind three blocks:
                   *     *                resume points b2, b3; stored: b1, b2, b3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from msgspec import Struct, field

from plait.state.blocks import Tokens, window_start

MAX_CHANGES = 4096  # of each kind in one `PrefixChanges`


class StoredBlock(Struct, frozen=True):
    """A block that a resume point needs. `parent`: the block before it, b"" of the first; `root`: the hash of
    the salt, of the first block only.
    """

    name: bytes
    parent: bytes
    tokens: tuple[int, ...]
    root: bytes = b""


class PrefixChanges(Struct, frozen=True):
    """What has changed since the last ones. `begins`: nothing that was reported before them is true any more.

    `added`, `removed`: resume points. `stored`, `dropped`: blocks before and at one, parents before their
    children in the first, behind them in the second.
    """

    begins: bool = False
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    stored: tuple[StoredBlock, ...] = ()
    dropped: tuple[bytes, ...] = ()


class PrefixNode(Struct, eq=False):
    """A whole block. `groups`: a bit for each group that has it. `num_below`: children that lead to a resume
    point. `is_whole`: all groups of full attention have it and all blocks before it.
    """

    name: bytes
    parent: PrefixNode | None
    tokens: tuple[int, ...]
    depth: int
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    groups: int = 0
    num_snapshots: int = 0
    num_below: int = 0
    is_whole: bool = False
    is_point: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether it is needed by a resume point: its own, or one behind it."""
        return self.is_point or self.num_below > 0


class PrefixTree:
    """The `PrefixListener` of an index with these windows. One thread calls everything.

    Memory follows what is cached: a block that is neither there nor before one that is is forgotten.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, *, has_slots: bool) -> None:
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._full = sum(1 << group for group, window in enumerate(windows) if window is None)
        self._reach = max((-(-window // block_size) for _, window in self._windows), default=0)
        self._block_size, self._has_slots = block_size, has_slots
        self._nodes: dict[bytes, PrefixNode] = {}
        self._fresh: set[PrefixNode] = set()  # that may hold nothing yet, and are kept until `take`
        self._points: dict[bytes, bool] = {}  # changes: whether it is one now
        self._blocks: dict[bytes, tuple[PrefixNode, bool]] = {}  # changes: whether it is stored now
        self._begins = True

    # As a PrefixListener

    def introduce(self, chain: Sequence[bytes], token_ids: Tokens, num_blocks: int) -> None:
        known = num_blocks
        while known and chain[known] not in self._nodes:
            known -= 1
        node = self._nodes.get(chain[known])
        if node is None:
            node = self._nodes[chain[0]] = PrefixNode(chain[0], None, (), 0, is_whole=True)
        for i in range(known, num_blocks):
            tokens = tuple(token_ids[i * self._block_size : (i + 1) * self._block_size])
            child = PrefixNode(chain[i + 1], node, tokens, i + 1)
            child.is_whole = node.is_whole and not self._full
            node.children[child.name] = self._nodes[child.name] = child
            node = child
        self._fresh.add(node)

    def add_block(self, group: int, name: bytes) -> None:
        if (node := self._nodes.get(name)) is not None:
            node.groups |= 1 << group
            self._refresh(node)

    def remove_block(self, group: int, name: bytes) -> None:
        if (node := self._nodes.get(name)) is not None:
            node.groups &= ~(1 << group)
            self._refresh(node)
            self._prune(node)

    def add_snapshot(self, parent: bytes) -> None:
        if (node := self._nodes.get(parent)) is not None:
            node.num_snapshots += 1
            self._mark(node)

    def remove_snapshot(self, parent: bytes) -> None:
        node = self._nodes.get(parent)
        if node is not None and node.num_snapshots:
            node.num_snapshots -= 1
            self._mark(node)
            self._prune(node)

    def clear(self) -> None:
        for changes in (self._nodes, self._fresh, self._points, self._blocks):
            changes.clear()
        self._begins = True

    # Reports

    def report_anew(self) -> None:
        """The next changes have everything: a reader that has lost some needs that."""
        self._points = {node.name: True for node in self._nodes.values() if node.is_point}
        self._blocks = {
            node.name: (node, True) for node in self._nodes.values() if node.depth and node.is_stored
        }
        self._begins = True

    def take(self) -> Iterator[PrefixChanges]:
        """Everything that has changed since the last call, in as many parts as MAX_CHANGES makes of it."""
        fresh, self._fresh = self._fresh, set()
        for node in fresh:
            self._prune(node)
        points, blocks, begins = self._points, list(self._blocks.values()), self._begins
        self._points, self._blocks, self._begins = {}, {}, False
        depth = attrgetter("depth")
        dropped = [node.name for node in sorted((n for n, is_in in blocks if not is_in), key=depth)][::-1]
        stored = [_describe(node) for node in sorted((n for n, is_in in blocks if is_in), key=depth)]
        removed = [name for name, is_in in points.items() if not is_in]
        added = [name for name, is_in in points.items() if is_in]
        size = max(len(added), len(removed), len(stored), len(dropped))
        for start in range(0, max(size, begins), MAX_CHANGES):
            part = slice(start, start + MAX_CHANGES)
            parts = tuple(added[part]), tuple(removed[part]), tuple(stored[part]), tuple(dropped[part])
            yield PrefixChanges(begins and not start, *parts)

    # Inside

    def _refresh(self, node: PrefixNode) -> None:
        """A block of this node came or went: that changes it, and what is behind it."""
        todo = [(node, 0)]
        while todo:
            one, distance = todo.pop()
            before = one.is_whole
            has_full = one.groups & self._full == self._full
            one.is_whole = has_full and (one.parent is None or one.parent.is_whole)
            self._mark(one)
            if before != one.is_whole or distance < self._reach:
                todo += [(child, distance + 1) for child in one.children.values()]

    def _mark(self, node: PrefixNode) -> None:
        """Find out whether a node is a resume point, and record the change for all before it."""
        is_point = node.is_whole and node.depth > 0 and self._has_state(node) and self._has_windows(node)
        if is_point == node.is_point:
            return
        was_stored = node.is_stored
        node.is_point = is_point
        _toggle(self._points, node.name, is_point)
        one: PrefixNode | None = node
        while one is not None and one.depth and was_stored != one.is_stored:
            self._record(one)
            if (parent := one.parent) is not None:
                was_stored = parent.is_stored
                parent.num_below += 1 if one.is_stored else -1
            one = parent

    def _record(self, node: PrefixNode) -> None:
        if node.name in self._blocks:  # it was reported as it is now, or never
            del self._blocks[node.name]
        else:
            self._blocks[node.name] = node, node.is_stored

    def _has_state(self, node: PrefixNode) -> bool:
        return node.num_snapshots > 0 if self._has_slots else True

    def _has_windows(self, node: PrefixNode) -> bool:
        """Whether each windowed group has the blocks that a query behind this one sees."""
        for group, window in self._windows:
            first = window_start(window, node.depth * self._block_size, self._block_size, node.depth)
            one, bit = node, 1 << group
            for _ in range(node.depth - first):
                if not one.groups & bit or one.parent is None:
                    return False
                one = one.parent
        return True

    def _prune(self, node: PrefixNode) -> None:
        """Forget a node that holds nothing, and those before it that were kept for it alone."""
        one: PrefixNode | None = node
        while one is not None and not (one.groups or one.num_snapshots or one.children):
            if one in self._fresh or self._nodes.get(one.name) is not one:  # the second: forgotten already
                return
            del self._nodes[one.name]
            if (parent := one.parent) is not None:
                del parent.children[one.name]
            one = parent


def _toggle(changes: dict[bytes, bool], name: bytes, is_in: bool) -> None:
    """Record a change, or that the last one was undone before it was reported."""
    if changes.pop(name, is_in) == is_in:
        changes[name] = is_in


def _describe(node: PrefixNode) -> StoredBlock:
    parent = node.parent
    if parent is None or not parent.depth:
        return StoredBlock(node.name, b"", node.tokens, b"" if parent is None else parent.name)
    return StoredBlock(node.name, parent.name, node.tokens)
