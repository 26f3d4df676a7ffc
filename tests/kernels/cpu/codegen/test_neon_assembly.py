"""What kernels become for aarch64: compiled and read, not run."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib import import_module

import pytest

target = import_module("plait.kernels.cpu.codegen.target")
binding = import_module("llvmlite.binding")

# Features in addition to those of every aarch64: only those that the forms need are on.
FEATURES = {"neon": "+neon", "neon-dotprod": "+neon,+dotprod", "neon-i8mm": "+neon,+dotprod,+i8mm"}
LIBRARY = {"sched_yield", "nanosleep", "clock_gettime", "syscall"}  # what kernels may call
LIBRARY |= {"SwitchToThread", "Sleep", "GetTickCount64"}

WRITTEN = """
import json
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from plait.kernels.cpu.codegen import target

target.DOT, target.AARCH64, target.X86_64 = sys.argv[1], True, False
from plait.kernels.cpu.linear import layout
from plait.kernels.cpu.linear import blocks_source as linear_source
from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.linear import codebooks as codes
from plait.kernels.cpu.codegen.vec import VF, VI, A, D, F, N

KINDS = {VF: vec.vf32, VI: vec.vi32, A: vec.i64, N: vec.i32, F: vec.f32, D: vec.f64}
triple = "aarch64-unknown-linux-gnu"


def function(module, name, kinds):
    made = ir.Function(module, ir.FunctionType(vec.VOID, [*(KINDS[k] for k in kinds), vec.i64]), name)
    return made, ir.IRBuilder(made.append_basic_block())


def operation(name):
    module = ir.Module(name)
    result, kinds, emit = vec.DEFINED[name]
    made, b = function(module, f"written_{name}", kinds)
    vec._store(b, made.args[-1], emit(b, *made.args[:-1]))
    b.ret_void()
    return module


def tile(kind, rows):
    module, context = ir.Module(kind), cpu_target.target_context
    block = linear_source.tile(layout.LAYOUTS[kind], rows)
    signature, lowered = block._defn(cpu_target.typing_context, *[types.int64] * 7)
    made, b = function(module, "tile", (A,) * 7)
    sums = lowered(context, b, signature, made.args[:7])
    for r in range(rows):
        vec._store(b, b.add(made.args[7], ir.Constant(vec.i64, 64 * r)), b.extract_value(sums, r))
    b.ret_void()
    return module


def assembly(module):
    module.triple = triple
    read = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(read, builder)
    return machine.emit_assembly(read)


llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple(triple).create_target_machine(cpu="generic", features=sys.argv[2], opt=3)
found = {name: assembly(operation(name)) for name in vec.DEFINED if not name.startswith(("tile_", "tiles_"))}
found |= {f"{kind}, {rows}": assembly(tile(kind, rows)) for kind in ("Q8_0", "Q4_0") for rows in (1, 4)}
print(json.dumps(found))
"""


@cache
def written(dot: str) -> dict[str, list[str]]:
    """Instructions of every operation of `vec`, and of tiles of linear layers, by name."""
    done = subprocess.run(
        [sys.executable, "-c", WRITTEN, dot, FEATURES[dot]], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    texts: dict[str, str] = json.loads(done.stdout)
    return {name: [line.strip() for line in text.splitlines()] for name, text in texts.items()}


def opened(lines: list[str]) -> list[str]:
    """Names of instructions, without directives and labels."""
    return [line.split()[0] for line in lines if line and line[0].isalpha() and not line.endswith(":")]


def has_backend() -> bool:
    binding.initialize_all_targets()
    try:
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not has_backend(), reason="this LLVM cannot write for aarch64"),
    pytest.mark.slow,
]


@pytest.mark.slow
@pytest.mark.parametrize("dot", FEATURES)
def test_operations_call_only_what_is_in_the_system(dot: str) -> None:
    for name, lines in written(dot).items():
        called = {line.split()[1] for line in lines if line.split()[:1] in (["bl"], ["b"])}
        outside = {label for label in called if not label.startswith(".L")}
        assert outside <= LIBRARY, name


@pytest.mark.parametrize(
    ("dot", "kind", "product"),
    [
        ("neon", "Q4_0", "smull"),
        ("neon", "Q8_0", "saddlp"),
        ("neon-dotprod", "Q4_0", "sdot"),
        ("neon-dotprod", "Q8_0", "sdot"),
        ("neon-i8mm", "Q4_0", "sdot"),
        ("neon-i8mm", "Q8_0", "usdot"),
    ],
)
def test_products_of_bytes_are_the_instructions_there_are(dot: str, kind: str, product: str) -> None:
    for rows in (1, 4):
        names = opened(written(dot)[f"{kind}, {rows}"])
        assert sum(name.startswith(product) for name in names) >= 8 * 4 * rows  # a block of 32, 16 outputs
        assert {"sdot", "usdot"} & set(names) == {product} & {"sdot", "usdot"}


def test_waiting_and_counting_are_instructions() -> None:
    for dot in FEATURES:
        assert "isb" in opened(written(dot)["pause"])
        # An acquiring load of the weaker kind could pass a counter of another thread.
        assert "ldar" in opened(written(dot)["atomic_get"])
        assert {"ldaxr", "stlxr"} <= set(opened(written(dot)["atomic_add"]))


def test_whole_vectors_are_stored_without_a_branch_for_each_lane() -> None:
    names = opened(written("neon")["store_some"])
    assert names.count("stp") + names.count("str") >= 2
