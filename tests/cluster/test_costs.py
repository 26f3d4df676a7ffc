"""The arithmetic of routing: tokens to compute, loads, and homes by hash."""

from __future__ import annotations

from plait.cluster.costs import count_missing, is_overloaded, order_by_home, rank_homes, weigh_load

NAMES = [f"replica-{i}" for i in range(10)]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert [count_missing(100, found) for found in (0, 64, 99, 100, 160)] == [100, 36, 1, 1, 1]
    assert count_missing(0, 0) == 0


def test_an_open_reply_weighs_as_much_as_64_tokens_that_wait() -> None:
    assert weigh_load(1000, 2) == 1128


def test_a_replica_that_goes_moves_only_the_names_that_it_had() -> None:
    names = [f"chat {i}".encode() for i in range(400)]
    before = {name: rank_homes(name, NAMES)[0] for name in names}
    after = {name: rank_homes(name, NAMES[:-1])[0] for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert moved == [name for name in names if before[name] == NAMES[-1]]
    assert all(rank_homes(name, NAMES)[1] == after[name] for name in moved)
    assert min(list(before.values()).count(name) for name in NAMES) > 20


def test_a_home_is_left_only_with_a_quarter_and_a_prompt_more_than_the_mean() -> None:
    assert not is_overloaded(2048 + 1.25 * 1000, 1000)
    assert is_overloaded(2049 + 1.25 * 1000, 1000)
    home, second, *rest = rank_homes(b"chat", NAMES)
    assert order_by_home(b"chat", dict.fromkeys(NAMES, 500.0)) == [home, second, *rest]
    loads = {**dict.fromkeys(NAMES, 500.0), home: 9000.0}
    assert order_by_home(b"chat", loads) == [second, *rest, home]
    assert order_by_home(b"chat", {}) == []
