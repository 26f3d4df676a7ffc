"""What an image has of launches and tables: addresses move with their memory, in low memory, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import CannotRecord
from plait.kernels.cpu.runtime.address_table import find_places, keep_addresses
from plait.kernels.cpu.runtime.threads import Address, argument, is_address
from plait.loading.image.capture import LEAST_ADDRESS, Memory, MemoryRange, _launch, _table_words
from plait.loading.image.file_format import Region

LOW = 0x1435D000  # in the heap of a Python that is not position-independent
HIGH = 0x7FFF24000000


def memory_at(*starts: int) -> Memory:
    return Memory([MemoryRange(start, 4096, Region("static", hex(start), 0, 4096)) for start in starts])


def launch_of(words: list[int], *addresses: int) -> Any:
    kernel = SimpleNamespace(name="some_kernel", address=HIGH - 4096)
    return SimpleNamespace(kernel=kernel, words=np.array(words, np.int64), addresses=frozenset(addresses))


@pytest.mark.parametrize("start", [LOW, HIGH])
def test_addresses_of_a_launch_move_with_their_memory(start: int) -> None:
    made = _launch(memory_at(start), launch_of([8, start, 612, start + 0x240, 0, -5], 1, 3, 4))
    assert made.words == (8, 0, 612, 0, 0, -5)
    assert made.moved == ((1, 0, 0), (3, 0, 0x240))


@pytest.mark.parametrize("word", [HIGH, HIGH + 4096, LEAST_ADDRESS])
def test_a_word_that_can_only_be_an_address_is_in_no_image(word: int) -> None:
    with pytest.raises(CannotRecord, match="word 2 of some_kernel is an address, and is not known as one"):
        _launch(memory_at(LOW, HIGH), launch_of([8, LOW, word], 1))


def test_a_number_may_be_like_an_address_in_low_memory() -> None:
    epsilon = argument(1e-5)
    made = _launch(memory_at(LOW, epsilon), launch_of([8, LOW, epsilon, LOW + 64], 1))
    assert made.words == (8, 0, epsilon, LOW + 64)
    assert made.moved == ((1, 0, 0),)


def test_a_table_says_which_of_its_words_are_addresses() -> None:
    target = torch.zeros(4)
    words = np.array([[7, LOW], [LOW + 8, 0]], np.int64)
    table = keep_addresses(words, [target], [1, 2])
    assert find_places(table.data_ptr()) == {1, 2}
    memory = memory_at(LOW)
    place = MemoryRange(table.data_ptr(), words.nbytes, Region("static", "table", 0, words.nbytes))
    memory = Memory([*memory.ranges, place])
    assert [*_table_words(memory, table)] == [(1, 8, 0, 0), (1, 16, 0, 8)]
    everything = keep_addresses(np.array([LOW, 0], np.int64), [target])
    assert find_places(everything.data_ptr()) == {0}
    del table, everything
    assert find_places(target.data_ptr()) == frozenset()


def test_arguments_that_are_addresses() -> None:
    array = np.zeros(1)
    assert all(map(is_address, (array, torch.zeros(1), Address(5))))
    assert not any(map(is_address, (5, 5.0, None, True)))
