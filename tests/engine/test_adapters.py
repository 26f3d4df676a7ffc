from __future__ import annotations

import pytest

from plait.engine.adapters import AdapterTable, no_adapters, parse_named
from plait.errors import BadFile, ConfigError, InvalidField, ModelNotFound


def made(num_slots: int = 2) -> tuple[AdapterTable, list[tuple[str, int]]]:
    seen = list[tuple[str, int]]()

    def load(slot: int, path: str) -> str:
        if path == "bad":
            raise BadFile("it is bad")
        seen.append((path, slot))
        return f"digest of {path}"

    return AdapterTable(num_slots, load, lambda slot: seen.append(("cleared", slot))), seen


def test_adapter_table_keeps_a_slot_until_no_sequence_uses_it() -> None:
    table, seen = made()
    table.load("a", "x", ())
    table.load("b", "y", ())
    with pytest.raises(InvalidField, match="all 2 places"):
        table.load("c", "z", ())
    table.unload("a", {1, 2})
    with pytest.raises(ModelNotFound):
        table.find("a")
    with pytest.raises(InvalidField, match="all 2 places"):
        table.load("c", "z", {1})
    table.load("c", "z", {0, 2})
    assert seen == [("x", 1), ("y", 2), ("cleared", 1), ("z", 1)]
    assert table.names == ("b", "c")


def test_adapter_salt_differs_from_that_of_the_model_and_of_other_adapters() -> None:
    table, _ = made()
    table.load("a", "x", ())
    table.load("b", "y", ())
    places = [table.place(name, "tenant") for name in ("", "a", "b")]
    assert [slot for slot, _ in places] == [0, 1, 2]
    assert places[0][1] == "tenant"
    assert len({salt for _, salt in places}) == 3


def test_adapter_that_cannot_be_loaded_leaves_its_name_and_slot_free() -> None:
    table, seen = made(1)
    with pytest.raises(BadFile):
        table.change("a", "bad", ())
    table.change("a", "x", ())
    with pytest.raises(InvalidField, match="loaded already"):
        table.change("a", "y", ())
    table.restore("a", "y", ())
    table.change("a", None, ())
    table.restore("a", None, ())
    assert seen == [("x", 1), ("cleared", 1), ("y", 1), ("cleared", 1)]
    with pytest.raises(ModelNotFound):
        table.change("a", None, ())


def test_engine_without_adapters_says_how_to_have_some() -> None:
    with pytest.raises(InvalidField, match="all 0 places"):
        no_adapters().load("a", "x", ())
    for text in ("a", "a=", "=x", "a b=x", "../a=x"):
        with pytest.raises(ConfigError):
            parse_named(text)
    assert parse_named("org/a:1=x=y") == ("org/a:1", "x=y")
