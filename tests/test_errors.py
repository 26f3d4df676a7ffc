from __future__ import annotations

import pytest

from plait.errors import MAX_TEXT, BadGrammar, InvalidField, clip_text
from plait.server.http.errors import problem
from plait.text.grammar.library import readable


def test_a_text_that_fits_stays_as_it_is() -> None:
    assert clip_text("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert clip_text(17, 2) == "17"


@pytest.mark.parametrize("most", [1, 2, 3, 10, 300])
def test_a_long_text_has_so_many_characters_and_keeps_both_ends(most: int) -> None:
    found = clip_text("a" * 500 + "b" * 500, most)
    assert len(found) == most
    if most >= 10:
        assert found.startswith("a")
        assert found.endswith("b")


def test_a_client_hears_which_field_and_what_to_do_whatever_it_sent() -> None:
    error = InvalidField(f"tool_choice: there is no tool {'x' * 20_000!r}; the tools are: f", "tool_choice")
    message = problem(error).message
    assert len(message) == MAX_TEXT
    assert message.startswith("tool_choice: there is no tool 'xxx")
    assert message.endswith("xxx'; the tools are: f")


def test_a_complaint_of_the_grammars_library_keeps_its_cause() -> None:
    complaint = (
        f'at 1(8): invalid regex "({"x" * 5000}":\n  ({"x" * 5000}\n  ^\nerror: unclosed group\n 1 | /x/'
    )
    message = problem(BadGrammar(f"the grammar cannot be honoured: {readable(complaint)}")).message
    assert "error: unclosed group; " in message
    assert len(message) <= MAX_TEXT
