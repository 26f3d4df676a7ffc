"""Options of other engines: what an error says about them."""

from __future__ import annotations

from plait.cli.common.other_names import NEEDLESS, OPTIONS, find_argument, find_hint
from plait.cli.generate import generate
from plait.cli.serve import serve


def _names(*commands: object) -> set[str]:
    params = [param for command in commands for param in command.params]  # type: ignore[attr-defined]
    return {name for param in params for name in (*param.opts, *param.secondary_opts)}


def test_what_another_name_stands_for_is_an_option_here() -> None:
    assert set(OPTIONS.values()) <= _names(generate, serve)


def test_no_option_of_serve_is_listed_as_another_engines() -> None:
    listed = [name for names in (*OPTIONS, *NEEDLESS) for name in names.split()]
    assert not _names(serve) & set(listed)


def test_an_option_that_only_another_command_has_is_not_named() -> None:
    assert find_hint("-n", ["--max-tokens"]) == "; here it is --max-tokens"
    assert find_hint("-n", ["--host"]).startswith(": requests have it")
    assert find_hint("-c", ["--host"]) == ""


def test_the_argument_is_named_of_which_the_parser_read_one_letter() -> None:
    assert find_argument("-n", ["model", "--no-np", "-1", "-np", "4"]) == "-np"
    assert find_argument("--ctx", ["--ctx=4", "-np"]) == "--ctx"
