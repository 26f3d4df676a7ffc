"""A fault of an engine that a prompt brings about; the cluster of these tests has it as `sitecustomize`.

So every Python process of the cluster imports it at startup, and nothing else of the tests. An engine process
ends in the step with a prompt that begins with POISON, as a defect of a kernel would end it. And steps take
as long as those of a larger model: else a reply may end before its cluster is hurt.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

POISON = [11, 12, 13, 14, 15, 16, 17, 18]
BROKEN = "plait.worker.child"
STEP_S = 0.002


class FaultFinder:
    """Finds the module of engine processes, and breaks it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != BROKEN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = BrokenLoader(spec.loader.name, spec.loader.path)
        return spec


class BrokenLoader(SourceFileLoader):
    """Loads it, and puts the fault into its steps."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.EngineChild.launch = make_faulty(module.EngineChild.launch)


def make_faulty(launch: Callable[..., object]) -> Callable[..., object]:
    """`EngineChild.launch`, but the process ends where a plan has the beginning of a poisonous prompt."""

    def launch_or_end(child: object, plan: object, sampling: object) -> object:
        time.sleep(STEP_S * plan.num_steps)  # type: ignore[attr-defined]
        ticket = launch(child, plan, sampling)  # its requests are in the status block now
        for chunk in plan.chunks:  # type: ignore[attr-defined]
            if chunk.start == 0 and [*chunk.token_ids[: len(POISON)]] == POISON:
                os.kill(os.getpid(), signal.SIGSEGV)
        return ticket

    return launch_or_end


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, FaultFinder())
