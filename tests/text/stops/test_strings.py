"""Stop strings, whatever the chunks of text that arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.text.stops.strings import StopMatcher

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4).map(tuple)


def stopped(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The meaning: the first stop string to be complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@given(st.lists(TEXT, max_size=8), STOPS, st.booleans())
def test_every_split_gives_what_the_whole_text_gives(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    shown, matched = "", None
    expected = stopped("".join(pieces), stops, include)
    for piece in pieces:
        emit, matched = matcher.push(piece)
        shown += emit
        assert expected[0].startswith(shown), "text was shown that belongs to a stop string"
    if matched is None:
        shown += matcher.flush()
    assert (shown, matched) == expected


@given(TEXT, STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    emit, matched = matcher.push(text)
    if matched is None:
        held = text[len(emit) :]
        assert held == "" or any(s.startswith(held) for s in stops)


def test_a_stop_string_over_three_tokens_is_not_shown() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert [matcher.push(t) for t in ("Hi\n", "\nUs", "er: x")] == [
        ("Hi", None),
        ("", None),
        ("", "\n\nUser:"),
    ]
    assert matcher.push("more") == ("", "\n\nUser:")
    assert matcher.flush() == ""


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "abcd")])
def test_include_shows_the_stop_string(include: bool, text: str) -> None:
    assert StopMatcher(("bcd",), include).push("abcde") == (text, "bcd")


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


def test_a_false_start_is_given_back_at_the_end() -> None:
    matcher = StopMatcher(("stop",))
    assert matcher.push("sto") == ("", None)
    assert matcher.flush() == "sto"


def test_a_long_text_of_false_starts_takes_linear_work() -> None:
    matcher = StopMatcher(("a" * 1000 + "b",))
    emitted = sum(len(matcher.push("a" * 1000)[0]) for _ in range(100))
    assert emitted + len(matcher.flush()) == 100_000
