"""A replica for each request: by reports, by what was sent since, and by hash when no replica reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from plait.cluster import routing_table
from plait.cluster.costs import count_missing, rank_homes
from plait.cluster.resume_points import ReplicaReport
from plait.cluster.routing_table import CHOICES, NEW_HOME_TOKENS, RARE_S, STALE_S, Route, RoutingTable
from plait.state.blocks import extend, root

BLOCK = 16


def chain_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    chain = [root(salt)]
    extend(chain, tokens, BLOCK)
    return chain[1:]


PROMPT = list(range(100))
CHAIN = chain_of(PROMPT)  # six whole blocks


def report(number: int = 1, waiting: int = 0, replies: int = 0, **more: tuple[bytes, ...]) -> ReplicaReport:
    return ReplicaReport(number, waiting, replies, begins=number == 1, **more)


def table(*, is_paged: bool = False, **reports: ReplicaReport) -> RoutingTable:
    found = RoutingTable(BLOCK, is_paged=is_paged, rng=random.Random(0))
    for name, one in reports.items():
        assert found.hear(name, one, 0.0)
    return found


def test_the_replica_with_the_longest_prefix_is_chosen_until_it_has_too_much_to_do() -> None:
    known = table(a=report(added=(CHAIN[1],)), b=report(added=(CHAIN[4],)), c=report())
    routes = known.choose(CHAIN, 100, 1.0)
    assert routes == [
        *(Route("b", 20, 20, "prefix"), Route("a", 68, 68, "prefix")),
        Route("c", 100, 100, "load"),
    ]
    assert known.hear("b", report(2, waiting=49), 1.0)
    assert [route.replica for route in known.choose(CHAIN, 100, 1.0)] == ["a", "b", "c"]
    assert known.hear("a", report(2, replies=1), 1.0)
    assert known.hear("b", report(3, replies=2), 1.0)
    assert known.choose(CHAIN, 100, 1.0)[0] == Route("c", 100, 100, "load")


def test_prefixes_of_another_salt_are_not_found() -> None:
    known = table(a=report(added=tuple(CHAIN)), b=report())
    assert known.choose(CHAIN, 100, 0.0)[0].why == "prefix"
    assert {route.why for route in known.choose(chain_of(PROMPT, "other"), 100, 0.0)} == {"load"}


def test_a_removed_point_and_a_removed_replica_are_not_found() -> None:
    known = table(a=report(added=(CHAIN[5],)), b=report())
    assert known.hear("a", report(2, removed=(CHAIN[5], b"never added")), 0.0)
    assert {route.why for route in known.choose(CHAIN, 100, 0.0)} == {"load"}
    assert known.hear("a", report(3, added=(CHAIN[5],)), 0.0)
    known.remove("a")
    known.remove("a")
    assert [(route.replica, route.missing) for route in known.choose(CHAIN, 100, 0.0)] == [("b", 100)]
    assert (known.num_points, set(known.replicas)) == (0, {"b"})


@pytest.mark.parametrize("is_paged", [True, False])
def test_what_was_sent_counts_until_the_replica_reports(is_paged: bool) -> None:
    known = table(is_paged=is_paged, a=report(), b=report())
    first = known.choose(CHAIN, 100, 0.0)[0]
    known.record_sent(first, CHAIN, 1)
    assert known.loads()[first.replica] == 164
    longer = chain_of([*PROMPT, *range(28)])
    found = {route.replica: route for route in known.choose(longer, 128, 0.0)}
    assert found[first.replica].missing == 128 - 6 * BLOCK
    shorter = {route.replica: route for route in known.choose(CHAIN[:4], 65, 0.0)}
    assert shorter[first.replica].missing == (1 if is_paged else 65)
    other = {route.replica: route for route in known.choose(chain_of([*PROMPT[:40], *PROMPT]), 140, 0.0)}
    assert other[first.replica].missing == (140 - 32 if is_paged else 140)
    assert known.hear(first.replica, report(2), 1.0)
    assert known.loads()[first.replica] == 0
    assert known.choose(CHAIN, 100, 1.0)[0].why == "load"
    assert known.num_points == 0


def test_a_reply_that_begins_and_ends_between_two_reports_is_no_load_after_it() -> None:
    known = table(a=report(), b=report())
    route = known.choose(CHAIN, 100, 0.0)[0]
    for key in (1, 2):
        known.record_sent(route, CHAIN, key)
    known.record_end(route, 2)
    assert known.loads()[route.replica] == 164
    assert known.hear(route.replica, report(2, replies=1), 1.0)
    known.record_end(route, 1)
    assert known.loads()[route.replica] == 64  # what the replica reported stays until its next report


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_request_on_its_way_counts_until_a_report_has_it(is_paged: bool) -> None:
    known = table(is_paged=is_paged, a=report(), b=report())
    route = known.choose(CHAIN, 100, 0.0)[0]
    for key in (4, 5):
        known.record_sent(route, CHAIN, key)
    assert known.hear(route.replica, report(2, waiting=100, replies=1), 1.0, 4)
    assert known.loads()[route.replica] == 2 * 164
    assert known.choose(CHAIN, 100, 1.0)[-1] == Route(route.replica, 4, 332, "prefix")
    removed = report(3, waiting=100, replies=1, added=(CHAIN[5],), removed=())
    assert known.hear(route.replica, removed, 1.0, 4)
    assert known.hear(route.replica, report(4, removed=(CHAIN[5],)), 1.0, 4)
    assert known.choose(CHAIN, 100, 1.0)[-1].missing == 4, "the other request will bring it back"
    assert known.hear(route.replica, report(5, replies=2), 1.0, 5)
    assert known.loads()[route.replica] == 128
    assert known.num_points == 0


def test_a_lost_report_drops_what_was_known_until_everything_is_reported_anew() -> None:
    known = table(a=report(added=(CHAIN[5],)), b=report())
    assert not known.hear("a", report(3, waiting=7, added=(CHAIN[2],)), 0.0)
    assert known.loads()["a"] == 7
    assert known.num_points == 0
    assert not known.hear("a", report(4), 0.0)
    assert known.hear("a", ReplicaReport(5, 0, 0, (CHAIN[3],), (), True), 0.0)
    assert known.hear("a", report(6, added=(CHAIN[4],)), 0.0)
    assert known.hear("a", report(5, removed=(CHAIN[4],)), 0.0), "a late message is ignored"
    assert known.choose(CHAIN, 100, 0.0)[0] == Route("a", 20, 20, "prefix")


def test_a_replica_that_is_silent_gets_requests_only_when_all_are() -> None:
    known = table(a=report(added=(CHAIN[5],)), b=report(waiting=9000))
    known.add("new")
    assert known.hear("b", report(2, waiting=9000), STALE_S)
    assert {route.replica for route in known.choose(CHAIN, 100, STALE_S + 1)} == {"b"}
    later = known.choose(CHAIN, 100, 3 * STALE_S, home=b"first message")
    assert [route.replica for route in later] == rank_homes(b"first message", ("a", "b", "new"))
    assert {route.why for route in later} == {"home"}


def test_a_home_that_this_gateway_has_filled_is_left_and_taken_again() -> None:
    known = table()
    known.add("a")
    known.add("b")
    home = known.choose(CHAIN, 10_000, 0.0)[0]
    known.record_sent(home, CHAIN, 1)
    assert known.choose(CHAIN, 10_000, 0.0)[0].replica != home.replica
    known.record_first_token(home)
    known.record_end(home, 1)
    assert known.choose(CHAIN, 10_000, 0.0)[0] == home


def test_readers_of_a_new_beginning_gather_in_one_replica_whichever_gateway_they_come_to() -> None:
    replicas, beginning = {f"r{i}": report() for i in range(8)}, chain_of([7] * 64)
    gateways = [table(**replicas) for _ in range(3)]
    taken = []
    for number, gateway in enumerate(gateways * 2):
        chain = chain_of([7] * 64 + [number] * 400)
        now = RARE_S * number
        taken.append(gateway.choose(chain, 464, now, home=beginning[-1], home_tokens=64)[0])
    assert {route.replica for route in taken} == {taken[0].replica}
    assert {(route.why, route.missing) for route in taken} == {("load", 464)}


def test_a_beginning_waits_for_what_it_saves_and_a_new_one_for_less() -> None:
    home = chain_of([7] * 1600)[-1]
    (first, second, _) = rank_homes(home, ("a", "b", "c"))

    def choose(waiting: int, *times: float) -> str:
        known = table(**{name: report(waiting=waiting * (name == first)) for name in "abc"})
        return [known.choose([], 2000, now, home=home, home_tokens=1600)[0].replica for now in times][-1]

    assert choose(NEW_HOME_TOKENS, 1.0) == first
    assert choose(NEW_HOME_TOKENS + 1, 1.0) == second
    assert choose(1600, 1.0, 1.0 + RARE_S) == first
    assert choose(1601, 1.0, 1.0 + RARE_S) == second
    assert choose(1, 1.0, 0.9 + RARE_S) == second  # it is popular, and load alone spreads it


def test_a_replica_that_has_the_beginning_comes_before_its_home() -> None:
    home = rank_homes(CHAIN[3], ("a", "b"))[0]
    other = {"a": "b", "b": "a"}[home]
    known = table(**{home: report(), other: report(added=(CHAIN[3],))})
    assert known.choose(CHAIN, 100, 1.0, home=CHAIN[3], home_tokens=64)[0] == Route(other, 36, 36, "prefix")


def test_beginnings_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cluster.routing_table.MAX_HOMES", 3)
    known = table(a=report(), b=report())
    for name in (b"1", b"2", b"1", b"3", b"4"):
        known.choose([], 100, 1.0, home=name, home_tokens=16)
    assert [*known._homes] == [b"1", b"3", b"4"]


def test_excluded_replicas_are_left_out_and_none_may_be_left() -> None:
    known = table(a=report(added=(CHAIN[3],)), b=report())
    assert known.choose(CHAIN, 100, 0.0, excluded={"a"}) == [Route("b", 100, 100, "only")]
    assert known.choose(CHAIN, 100, 0.0, excluded={"b"}) == [Route("a", 36, 36, "only")]
    assert known.choose(CHAIN, 100, 0.0, excluded={"a", "b"}) == []
    assert table().choose([], 5, 0.0) == []


def test_calls_about_a_replica_that_has_ended_change_nothing() -> None:
    known = table(a=report(), b=report())
    route = known.choose(CHAIN, 100, 0.0)[0]
    known.remove(route.replica)
    known.record_sent(route, CHAIN, 1)
    known.record_first_token(route)
    known.record_end(route, 1)
    assert route.replica not in known.replicas
    assert known.num_points == 0


def test_points_of_one_replica_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_table, "MAX_POINTS", 4)
    known = table(a=report(added=tuple(CHAIN)), b=report())
    assert known.num_points == 4
    assert known.choose(CHAIN[:2], 40, 0.0)[0].why == "load"
    assert known.choose(CHAIN[:3], 50, 0.0)[0].missing == 2


def test_choices_are_the_cheapest_of_all_replicas_in_random_clusters() -> None:
    rng = random.Random(3)
    for _ in range(200):
        held = {f"r{i}": rng.sample(range(6), rng.randrange(4)) for i in range(rng.randrange(2, 9))}
        loads = {name: rng.choice((0, 20, 50, 100)) for name in held}
        known = table(**{n: report(waiting=loads[n], added=tuple(CHAIN[i] for i in held[n])) for n in held})
        costs = sorted(
            loads[n] + count_missing(100, max((16 * (i + 1) for i in held[n]), default=0)) for n in held
        )
        assert [route.cost for route in known.choose(CHAIN, 100, 0.0)] == costs[:CHOICES]
