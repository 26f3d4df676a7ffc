"""Lower every launch that GPU variants make on the cases of their ops, as a real GPU specializes it.

    python -m tests.kernels.triton.lower_launches [OP]      prints one JSON object

The interpreter sees Python's numbers and tensors. On a GPU an integer that is 1 is a constant, one that 16
divides is known to be, and a number of another type is refused. So each launch goes through Triton's own
binder, and from there to its first intermediate code. Inputs lie on a GPU that is pretended, so a case with a
tensor of the host is found, too. Nothing runs, and no GPU is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from plait.kernels.load import load_for_gpu
from plait.model.mixers.registry import list_mixers
from plait.ops.attention import BLOCK
from plait.ops.chip import EXAMPLES
from plait.ops.linear import bind_layers
from plait.ops.registry import REGISTRY, OpFacts
from tests.kernels.triton.match_forms import find_form, name_launch
from tests.pretend_gpu import pretended

TARGET = GPUTarget("cuda", 90, 32)
STANDARD = {"block_size": BLOCK, "kv_dtype": "model"}
MOST_Y = 65535  # programs of the second and third dimension of a grid


class Lowering:
    """Replaces `JITFunction.run`. `faults`: what a GPU would refuse, with how often; `uncompiled`: kinds of
    launches that no form of gate C has (`match_forms`)."""

    def __init__(self) -> None:
        self.backend: Any = make_backend(TARGET)
        self.binders: dict[JITFunction, Any] = {}
        self.seen: dict[object, Exception | None] = {}
        self.faults: Counter[str] = Counter()
        self.uncompiled: Counter[str] = Counter()
        self.num_launches = 0

    def run(self, kernel: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> None:
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
        bound, special, rest = self.binders[kernel](*args, **options)
        if max((*grid, 1, 1)[1:3]) > MOST_Y:
            self.faults[f"{kernel.fn.__name__}: a grid of {grid}"] += 1
        constants = [
            str(value)
            for param, value in zip(kernel.params, bound.values(), strict=True)
            if param.is_constexpr
        ]
        key = kernel, str(special), str(sorted(rest.items())), str(constants)
        self.num_launches += 1
        if key not in self.seen:
            self._match(kernel, bound, special)
        if key not in self.seen:
            try:
                self.seen[key] = self._lower(kernel, options, bound, special, rest)
            except Exception as error:
                self.seen[key] = error
        if (error := self.seen[key]) is not None:
            raise error

    def _match(self, kernel: Any, bound: Any, special: Any) -> None:
        """Note a launch of a kind that gate C does not compile."""
        types = {name: str(kind) for name, (kind, *_) in zip(bound, special, strict=True)}
        constants = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr}
        if find_form(kernel.fn.__name__, bound, types, constants) is None:
            self.uncompiled[f"{kernel.fn.__name__}: {name_launch(bound, types, constants)}"] += 1

    def _lower(self, kernel: Any, options: Any, bound: Any, special: Any, rest: Any) -> None:
        made, signature, constants, attributes = kernel._pack_args(
            self.backend, options, bound, special, rest
        )
        context = ir.context()
        ir.load_dialects(context)
        self.backend.load_dialects(context)
        source = ASTSource(kernel, signature, constants, attributes)
        source.make_ir(
            TARGET,
            made,
            self.backend.get_codegen_implementation(made),
            self.backend.get_module_map(),
            context,
        )


def main() -> None:
    only, patch, lowering, cases = sys.argv[1:2], pytest.MonkeyPatch(), Lowering(), 0

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        lowering.run(kernel, grid, args, {"debug": False, **options})

    patch.setattr(JITFunction, "run", run)
    load_for_gpu()
    list_mixers()
    with pretended(patch):
        for op in REGISTRY.values():
            variants = [v for v in op.variants if v.on == "cuda" and ".triton." in v.module]
            for number, case in enumerate(op.cases if not only or only == [op.name] else ()):
                for variant in variants:
                    dtype = torch.bfloat16
                    facts = OpFacts("cuda", dtype, {**STANDARD, **case}, chip=EXAMPLES[90])
                    if dtype not in op.tolerance or variant.refusal(facts) is not None:
                        continue
                    cases += 1
                    try:
                        assert op.make is not None
                        args, kwargs = op.make(case, dtype, "cuda:0")
                        variant.fn(*bind_layers(args, facts), **kwargs)
                    except Exception as error:
                        text = " ".join(str(error).split())[-300:]
                        lowering.faults[f"{op.name} ({variant.name}), case {number}: {text}"] += 1
    found = {"cases": cases, "launches": lowering.num_launches, "forms": len(lowering.seen)}
    sys.stdout.write(json.dumps({**found, "faults": lowering.faults}) + "\n")


if __name__ == "__main__":
    main()
