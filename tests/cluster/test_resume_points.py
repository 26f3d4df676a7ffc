"""What a replica reports: changes, everything after a gap, and never more than a bound in one message."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from plait.cluster.resume_points import MAX_CHANGES, ReplicaReport, ResumePoints
from plait.state.prefix_tree import PrefixChanges


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def apply(known: set[bytes], reports: list[ReplicaReport]) -> set[bytes]:
    for report in reports:
        known = set() if report.begins else known
        known = (known - set(report.removed)) | set(report.added)
    return known


def test_first_report_has_everything_and_later_ones_the_changes() -> None:
    points = ResumePoints()
    points.add(name(1))
    points.add(name(2))
    assert points.report(70, 3) == [ReplicaReport(1, 70, 3, (name(1), name(2)), (), True)]
    assert not points.has_changed
    assert points.report(0, 0) == [ReplicaReport(2, 0, 0)]
    points.add(name(3))
    assert points.has_changed
    points.remove(name(1))
    assert points.report(0, 1) == [ReplicaReport(3, 0, 1, (name(3),), (name(1),))]
    points.begin_anew()
    assert points.report(0, 0) == [ReplicaReport(4, 0, 0, (name(2), name(3)), (), True)]


def test_a_point_that_came_and_went_between_two_reports_is_in_none() -> None:
    points = ResumePoints()
    points.add(name(1))
    points.report(0, 0)
    points.add(name(2))
    points.remove(name(2))
    points.remove(name(1))
    points.add(name(1))
    assert points.report(0, 0) == [ReplicaReport(2, 0, 0)]


def test_a_point_with_two_snapshots_stays_until_both_are_gone() -> None:
    points = ResumePoints()
    points.add(name(1))
    points.add(name(1))
    points.remove(name(1))
    assert points.report(0, 0)[0].added == (name(1),)
    points.remove(name(1))
    assert points.report(0, 0)[0].removed == (name(1),)
    assert len(points) == 0
    with pytest.raises(AssertionError, match="never added"):
        points.remove(name(1))


def test_too_many_changes_become_everything_in_messages_of_bounded_size() -> None:
    points = ResumePoints()
    points.report(0, 0)
    for number in range(MAX_CHANGES + 1):
        points.add(name(number))
    reports = points.report(5, 1)
    assert [(len(r.added), r.begins, r.number) for r in reports] == [(MAX_CHANGES, True, 2), (1, False, 3)]
    assert all((r.waiting_tokens, r.open_replies) == (5, 1) for r in reports)


def test_reports_add_up_to_what_a_random_walk_left() -> None:
    rng, points, counts, known = random.Random(1), ResumePoints(), Counter[bytes](), set[bytes]()
    for _ in range(2000):
        point = name(rng.randrange(30))
        if counts[point] and rng.random() < 0.5:
            counts[point] -= 1
            points.remove(point)
        else:
            counts[point] += 1
            points.add(point)
        if rng.random() < 0.1:
            if rng.random() < 0.2:
                points.begin_anew()
            known = apply(known, points.report(0, 0))
            assert known == {p for p, count in counts.items() if count}


def test_changes_of_an_engine_become_reports_and_a_new_engine_begins_anew() -> None:
    points = ResumePoints()
    points.apply(PrefixChanges(begins=True, added=(name(1), name(2))))
    known = apply(set(), points.report(0, 0))
    points.apply(PrefixChanges(removed=(name(1),), added=(name(3),)))
    reports = points.report(0, 0)
    assert not reports[0].begins
    known = apply(known, reports)
    assert known == {name(2), name(3)}
    points.apply(PrefixChanges(begins=True))
    points.apply(PrefixChanges(added=(name(4),)))
    assert apply(known, points.report(0, 0)) == {name(4)}
