"""How a wheel is built: with compiled kernels in it, it is for the Python and the system that made them."""

import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = "plait/kernels/cpu/shipped"


class ShippedKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Wheels of a tree that `tools/ship_kernels.py` has filled; any other is for every Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not any(Path(self.root, SHIPPED).glob("*/*.kernel")):
            return
        build_data["artifacts"].append(f"{SHIPPED}/*/*.kernel")
        # Object code of LLVM, which needs no libraries: any Linux with the Python that read it back.
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        build_data["tag"] = f"{python}-none-manylinux_2_17_{platform.machine()}"
