"""The memory in which packed weights are kept."""

from __future__ import annotations

import gc
import weakref

import torch

from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.tile_memory import HUGE, ROOM, Rooms


def test_small_weights_share_memory_and_do_not_overlap() -> None:
    rooms = Rooms()
    taken = [rooms.take(n) for n in (1, 64, 100, 4096, 3 << 20)]
    for i, x in enumerate(taken):
        assert x.dtype == torch.uint8
        assert x.data_ptr() % LINE == 0
        assert not x.any()
        x.fill_(i + 1)
    assert all(torch.all(x == i + 1) for i, x in enumerate(taken))
    assert len({x.untyped_storage().data_ptr() for x in taken}) == 1


def test_large_ones_have_their_own_at_the_start_of_a_large_page() -> None:
    rooms = Rooms()
    one, other = rooms.take(ROOM // 4 + 1), rooms.take(ROOM // 4 + 1)
    assert one.data_ptr() % HUGE == other.data_ptr() % HUGE == 0
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_a_full_chunk_is_followed_by_another_and_goes_with_its_weights() -> None:
    rooms = Rooms()
    first = [rooms.take(ROOM // 4) for _ in range(4)]
    next_one = rooms.take(ROOM // 4)
    storage = weakref.ref(first[0].untyped_storage())
    assert next_one.untyped_storage().data_ptr() != first[0].untyped_storage().data_ptr()
    gc.collect()
    assert storage() is not None
    first.clear()
    gc.collect()
    assert storage() is None
    assert not rooms.take(64).any()
