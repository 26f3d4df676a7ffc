"""Which adapters have changed since startup, so that an engine that follows another has the same ones."""

from __future__ import annotations

from collections.abc import Callable

from plait.errors import EngineRestarting
from plait.worker import protocol


class AdapterChanges:
    """Changes that an engine has made, and those that it was sent and has not answered.

    The supervisor's thread uses it. A change counts once the engine has answered, before its requester knows.
    """

    def __init__(self) -> None:
        self._made: dict[str, str | None] = {}  # paths, None: unloaded
        self._sent: dict[int, tuple[str, str | None]] = {}

    def send(self, number: int, name: str, path: str | None) -> protocol.ChangeAdapter:
        """The message for a change of which `read` will get the result."""
        self._sent[number] = (name, path)
        return protocol.ChangeAdapter(number, name, path)

    def refuse(self, number: int) -> protocol.AdapterChanged:
        """The answer to a change for which there is no engine now."""
        why = "another engine is loading, and no adapter was changed; try again later"
        return protocol.AdapterChanged(number, EngineRestarting(why))

    def read(self, message: protocol.FromChild) -> str | None:
        """Record the change, if the message says that the engine has made or refused one.

        Returns the name of the adapter if it was unloaded.
        """
        if isinstance(message, protocol.AdapterChanged):
            name, path = self._sent.pop(message.number)
            if message.error is None:
                self._made[name] = path
                return name if path is None else None
        return None

    def restore(self, send: Callable[[protocol.ChangeAdapter], None]) -> None:
        """Have a new engine unload what was unloaded, which makes places, and then load what was loaded."""
        self._sent.clear()  # the engine before it does not answer any more
        for name, path in sorted(self._made.items(), key=lambda item: item[1] is not None):
            send(protocol.ChangeAdapter(0, name, path))
