"""Tables of launches for speculative turns: glue between passes, draws from their logits, tables as one.

Nothing here needs Numba or torch: kernels are given by their addresses. `turns` has those of the glue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.runtime.frame_words import LOGITS, TOKENS
from plait.kernels.cpu.runtime.row_launches import draw_scratch
from plait.kernels.cpu.runtime.threads import Launchable, LaunchTable, Threads, argument


class TurnTables:
    """Makes tables that `threads` run. `kernels`: those of `turns.GLUE` by name, and "draw"."""

    def __init__(self, threads: Threads, kernels: Mapping[str, Launchable]) -> None:
        self._threads, self._kernels = threads, kernels

    @property
    def steps(self) -> int:
        """The address at which a launch can put an end to the steps of a call."""
        return self._threads.steps

    def glue(self, name: str, *args: object) -> LaunchTable:
        """One launch of a kernel of `turns.GLUE`, which says what its arguments are. For `join`."""
        return self._launch(name, TOKENS, args)

    def draw(
        self, logits: npt.NDArray[np.float32], width: int, settings: tuple[object, ...], ids: object
    ) -> LaunchTable:
        """The draw from each row of a pass's logits, of which `width` columns count; see `launch_draw`."""
        table = self._launch("draw", LOGITS, (logits, logits.strides[0], width, *settings, ids))
        table.scratch = draw_scratch(width)
        return table

    def join(self, parts: Sequence[object]) -> LaunchTable:
        """Launch tables as one: launches take two counters in turns, so each begins at an even place."""
        made, nothing = LaunchTable(kept=[*parts]), self.glue("nothing")
        for part in parts:
            assert isinstance(part, LaunchTable)
            if made.count % 2 and part.count > 1:
                made.entries += nothing.entries
            made.entries += part.entries
            made.scratch, made.shared = max(made.scratch, part.scratch), max(made.shared, part.shared)
        made.kept.append(nothing)
        made.seal()
        return made

    def _launch(self, name: str, rows: int, args: tuple[object, ...]) -> LaunchTable:
        """rows: the word of the frame that has their number."""
        array = np.array([8 * rows, self._threads.counters, *map(argument, args)], np.int64)
        table = LaunchTable([self._kernels[name].address, int(array.ctypes.data)], kept=[array, args])
        table.seal()
        return table
