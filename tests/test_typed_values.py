"""Types that several threads decode for the first time, at the same time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from plait.typed_values import convert_to, decode_json, decode_msgpack, msgpack_decoder

PACKAGE = Path(__file__).resolve().parent.parent / "plait"
# Threads that are switched as often as possible. Without a lock around descriptions the process ends with
# SIGSEGV at the first of these types.
RACE = """
import dataclasses, sys, threading
import msgspec
from plait import typed_values

sys.setswitchinterval(1e-6)
NAMES, WAY = [f"f{i}" for i in range(8)], sys.argv[1]
PLAIN = {name: {name: i for i, name in enumerate(NAMES)} for name in NAMES}
JSON, PACKED = msgspec.json.encode(PLAIN), msgspec.msgpack.encode(PLAIN)

def new_type():
    make = dataclasses.make_dataclass if WAY == "dataclass" else msgspec.defstruct
    inner = [make(f"Inner{i}", [(name, int | None, None) for name in NAMES]) for i in range(8)]
    return make("Outer", [(name, kind | None, None) for name, kind in zip(NAMES, inner)])

def decode(kind):
    if WAY == "json":
        return typed_values.decode_json(JSON, kind)
    if WAY == "msgpack":
        return typed_values.msgpack_decoder(kind).decode(PACKED)
    return typed_values.convert_to(PLAIN, kind)

for _ in range(40):
    kind, together, found = new_type(), threading.Barrier(8), []
    def run():
        together.wait()
        found.append(decode(kind).f7.f7)
    threads = [threading.Thread(target=run) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [7] * 8, found
"""


@pytest.mark.parametrize("way", ["dataclass", "struct", "json", "msgpack"])
def test_threads_may_decode_a_new_type_at_once(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, way], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


class Pair(msgspec.Struct):
    left: int
    right: str = ""


def test_values_are_those_of_msgspec() -> None:
    pair = Pair(5, "x")
    assert convert_to({"left": 5, "right": "x"}, Pair) == pair
    assert decode_json(b'{"left": 5, "right": "x"}', Pair) == pair
    packed = msgspec.msgpack.encode(pair)
    decoder: msgspec.msgpack.Decoder[Pair] = msgpack_decoder(Pair)
    assert decode_msgpack(packed, Pair) == decoder.decode(packed) == pair
    assert convert_to([{"left": 5}], list[Pair]) == [Pair(5)]
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        convert_to({"left": "5"}, Pair)


def typed_uses(path: Path) -> list[int]:
    """The lines on which a module has msgspec decode to a type, or make a decoder."""
    found, text = list[int](), path.read_text(encoding="utf-8")
    may_use = "msgspec" in text and re.search("convert|Decoder|type=|from msgspec", text)
    for node in ast.walk(ast.parse(text)) if may_use else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            is_typed = name in {"convert", "Decoder"} or any(word.arg == "type" for word in node.keywords)
            found += [node.lineno] if is_typed else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msgspec"):
            names = {alias.name for alias in node.names}
            found += [node.lineno] if names & {"convert", "json", "msgpack"} else []
    return found


def test_no_other_module_decodes_to_a_type_by_msgspec_itself() -> None:
    found = {str(path.relative_to(PACKAGE)): typed_uses(path) for path in PACKAGE.rglob("*.py")}
    assert len(found.pop("typed_values.py")) == 5
    assert {name: lines for name, lines in found.items() if lines} == {}
