"""The adapters that requests may name, as the engine has them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from plait.engine.adapters import parse_named, why_no_name
from plait.errors import InvalidField, ModelNotFound
from plait.frontend.loop import Loop


class ServedAdapters:
    """Names and paths of adapters. They change one at a time, so that these are in the order of the engine's.

    `first`: those of the startup, NAME=PATH. `paths` is replaced as a whole: any thread may read it.
    """

    def __init__(self, loop: Loop, first: Iterable[str]) -> None:
        self.paths: Mapping[str, str] = dict(map(parse_named, first))
        self._loop, self._changing = loop, threading.Lock()

    def load(self, name: str, path: str) -> None:
        """Load an adapter from a path inside of `lora_folder`; blocks. Raises PlaitError, one line each."""
        if (why := why_no_name(name)) is not None:
            raise InvalidField(f"lora_name: {why}", "lora_name")
        with self._changing:
            self._loop.change_adapter(name, path)
            self.paths = {**self.paths, name: path}

    def unload(self, name: str) -> None:
        """Take an adapter's name away; its open requests go on. Blocks.

        Raises ModelNotFound, and EngineRestarting: the adapter stays then, here and in the next engine.
        """
        with self._changing:
            try:
                self._loop.change_adapter(name, None)
            except ModelNotFound:
                self._forget(name)  # an engine that followed another could not load it
                raise
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.paths = {known: path for known, path in self.paths.items() if known != name}
