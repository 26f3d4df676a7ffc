"""Names that users write and read: no option of the command line and no field of the HTTP API vanishes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_surface", ROOT / "tools" / "list_surface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_surface_equals_the_committed_list(tool: ModuleType) -> None:
    committed = tool.COMMITTED.read_text("utf-8").splitlines()
    assert tool.compare(set(committed), set(tool.list_surface())) == []
    assert committed == sorted(set(committed))


def test_surface_names_options_fields_events_and_aliases(tool: ModuleType) -> None:
    expected = {
        "plait serve --max-model-len",
        "plait serve --dtype bfloat16",
        "plait serve --no-prefix-cache",
        "plait generate [model_argument]",
        "GET /metrics",
        "POST /v1/chat/completions request stream_options.include_usage",
        "POST /v1/chat/completions reply choices[].message.content",
        "POST /v1/chat/completions event choices[].delta.content",
        "alias n_predict = max_tokens",
        "known field mirostat",
    }
    assert expected - set(tool.list_surface()) == set()


def test_compare_names_what_vanished_and_says_how_to_add_what_is_new(tool: ModuleType) -> None:
    assert tool.compare({"a --old", "a --kept"}, {"a --kept", "a --new"}) == [
        "vanished: a --old; users rely on it, see docs/deprecation.md",
        "new: a --new; run: python tools/list_surface.py --write",
    ]


def test_list_options_finds_switches_values_and_commands_in_groups(tool: ModuleType) -> None:
    options = [click.Option(["--on/--off"]), click.Option(["--of", "-o"], type=click.Choice(["x"]))]
    group = click.Group("g", commands={"c": click.Command("c", params=[*options, click.Argument(["file"])])})
    assert sorted(tool.list_options(group, "g")) == [
        *("g", "g c", "g c --of", "g c --of x", "g c --off", "g c --on", "g c -o", "g c [file]"),
    ]


def test_list_fields_follows_references_lists_and_a_type_in_itself(tool: ModuleType) -> None:
    node = {"properties": {"id": {}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/x/Node"}]}}}
    schema = {"properties": {"all": {"items": {"$ref": "#/x/Node"}}, "by": {"additionalProperties": node}}}
    found = set(tool.list_fields(schema, {"Node": node}))
    assert {"all", "all[].id", "all[].next", "by", "by.*.id"} <= found
    assert "all[].next.next" not in found
