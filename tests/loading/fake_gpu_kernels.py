"""GPU variants for tests of trials: right, wrong, racing, hanging, crashing. The "GPU" is the CPU."""

from __future__ import annotations

import os
import time
from itertools import count

import torch
from torch import Tensor

from plait.ops.registry import Op, op

MODULE = __name__
FATES = ("right", "wrong", "racing", "hanging", "crashing", "raising", "killed")
_calls = count(1)


def _make(fate: str) -> Op:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    double.__name__ = f"double_{fate}"
    made = op(cases=[{"size": 4}, {"size": 9, "kind": "large"}, {"size": 6}])(double)

    @made.inputs
    def inputs(case, dtype, device):  # type: ignore[no-untyped-def]
        return (torch.randn(case["size"], dtype=dtype, device=device),), {}

    @made.variant("fake", on="cuda")
    def fake(x: Tensor) -> Tensor:
        match fate:
            case "wrong":
                return 2 * x + 1e-3
            case "racing":
                return 2 * x + 1e-7 * next(_calls)
            case "hanging":
                time.sleep(600)
            case "crashing":
                os.abort()
            case "raising":
                raise RuntimeError("PassManager::run failed\nat line 3")
            case "killed":
                os.kill(os.getpid(), 9)
        return x + x

    return made


OPS = {fate: _make(fate) for fate in FATES}
