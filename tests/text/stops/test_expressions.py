"""`stop_regex`: the first end of a match, as every cut of the text gives it, against Python's `re`."""

import random
import re

import pytest

from plait.errors import InvalidField
from plait.text.stops.expressions import MOST_KEPT, Automaton, ExpressionMatcher, open_matcher
from plait.text.stops.pattern import MAX_NODES

PATTERNS = (
    "ab(abc|abd)",
    "a+b",
    "(a|ab)(c|bcd)",
    r"\d{2,3}c",
    "[^a-c]x?y",
    "a.*c",
    r"(?i)AB\s",
    r"(?m)^b",
    r"^ab",
    r"a(?:b|c)*?d|ca",
    r"[\w-]\n",
    "(a?){3}b{2}",
    r"(?s)c.a",
    "(?i:a)B",
    r"(?P<word>\w)[\d\s]",
)
ALPHABET = "aabbcdxyAB12 \n"


def first_end(pattern, text):
    """(begin, end) of the match that ends first, the longest of those; by definition."""
    found = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for begin in range(end):
            # `fullmatch` from `begin` has ^ only where the text really begins a line.
            if found.fullmatch(text, begin, end):
                return begin, end
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expression_ends_text_where_python_finds_the_first_end_however_it_is_cut(pattern):
    rng = random.Random(pattern)
    for _ in range(60):
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 24)))
        expected = first_end(pattern, text)
        matcher, shown, at = ExpressionMatcher((), (pattern,)), "", 0
        while at < len(text):
            size = rng.randrange(1, 5)
            shown += matcher.push(text[at : at + size])[0]
            at += size
            bound = len(text) if expected is None else expected[0]
            assert len(shown) <= bound, "text of the match was shown"
        if expected is None:
            assert matcher.matched is None
            assert shown + matcher.flush() == text
        else:
            assert (matcher.matched, shown) == (pattern, text[: expected[0]])


def test_text_is_held_back_only_while_it_may_become_a_match():
    matcher = ExpressionMatcher((), (r"\n\s*User:",))
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("  ") == ("", None)
    assert matcher.push("you") == ("\n  you", None)
    assert matcher.push("\n\nUser") == ("", None)
    assert matcher.push(": hi") == ("", r"\n\s*User:")
    assert matcher.push("more") == ("", r"\n\s*User:")


def test_string_and_expression_stop_whichever_ends_first_and_of_both_the_longer():
    assert open_matcher(("lo",), ("l+",)).push("hello") == ("he", "l+")
    assert open_matcher(("el",), ("h?el",)).push("hello") == ("", "h?el")
    assert open_matcher(("hel",), ("el",)).push("hello") == ("", "hel")
    matcher = open_matcher(("world!",), (r"\d",))
    assert matcher.push("a worl") == ("a ", None)
    assert matcher.push("d 1") == ("world ", r"\d")


def test_match_is_part_of_the_text_where_that_is_requested():
    assert ExpressionMatcher((), (r"\d\d",), include=True).push("ab 12 c") == ("ab 12", r"\d\d")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "empty"),
        ("a*", "matches an empty text"),
        ("(?m)^", "matches an empty text"),
        ("(", "has no end"),
        ("a)", "no group to close"),
        ("[a", "ends too early"),
        ("*a", "nothing to repeat"),
        ("a**", "repetition of a repetition"),
        ("a{3,2}", "m ≤ n"),
        ("a{99999}", "at most"),
        ("a$", "the text that follows"),
        (r"\bword", "a stream cannot"),
        (r"(a)\1", "a stream cannot"),
        ("(?=a)b", "look ahead"),
        ("(?<!a)b", "look ahead"),
        ("[[:alpha:]]", "classes in classes"),
        (r"\p{L}", "not known"),
        (r"\x{110000}", "no character"),
        ("[b-a]", "upwards"),
        ("(?q)a", "flags"),
        ("(" * 40 + "a" + ")" * 40, "groups are in each other"),
        ("((a{1000}){1000}){1000}", f"more than {MAX_NODES}"),
        ("((){1000}){1000}b", f"more than {MAX_NODES}"),
    ],
)
def test_expression_that_cannot_be_kept_is_refused_by_name_and_place(pattern, why):
    with pytest.raises(InvalidField, match=re.escape(why)) as raised:
        Automaton((pattern,))
    assert raised.value.param == "stop_regex"


def test_hostile_expression_costs_a_bounded_number_of_steps_and_states():
    hostile = "(a|a)*(a|aa)*" + "(a|b)?" * 40 + "(a*)*x{1,99}!"
    automaton = Automaton((hostile,))
    state = automaton.first
    rng, kept = random.Random(1), 0
    for _ in range(3000):
        state = automaton.step(state, rng.choice("aabx")).state
        size = sum(map(len, state.groups))
        assert size <= MAX_NODES, "a node is live once"
        kept = max(kept, sum(len(group) for one in automaton._states for group in one))
    assert 0 < kept <= MOST_KEPT + MAX_NODES
