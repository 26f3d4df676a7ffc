"""The adapters that an engine has loaded: names, slots, and which of them may be loaded at run time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from msgspec import Struct

from plait.errors import ConfigError, InvalidField, ModelNotFound

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
Load = Callable[[int, str], str]  # puts the adapter at a path into a slot; returns a hash of its numbers


class LoadedAdapter(Struct, frozen=True):
    """An adapter in a slot. digest: a hash of its numbers; two adapters with one digest are the same."""

    slot: int
    digest: str


def salt_prefix(salt: str, digest: str) -> str:
    """The salt of prefixes that an adapter computes: no request without it, or with another, finds them."""
    return f"{salt}\0adapter {digest}"


class AdapterTable:
    """Adapters by name. One that is unloaded keeps its slot until no sequence uses it any more.

    load, clear: fill and free a slot; both are called between two steps.
    """

    def __init__(self, num_slots: int, load: Load, clear: Callable[[int], None]) -> None:
        self.num_slots, self._load, self._clear = num_slots, load, clear
        self._by_name: dict[str, LoadedAdapter] = {}
        self._unloaded: set[int] = set()  # slots of adapters without a name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str) -> LoadedAdapter:
        """Raises ModelNotFound."""
        if name not in self._by_name:
            raise ModelNotFound(f"the adapter {name[:200]!r} is not loaded here (any more)", "model")
        return self._by_name[name]

    def place(self, name: str, salt: str) -> tuple[int, str]:
        """The slot of an adapter, and a salt for what it computes, which is no other's prefix.

        name: "" for the model alone, which has slot 0. Raises ModelNotFound.
        """
        if not name:
            return 0, salt
        found = self.find(name)
        return found.slot, salt_prefix(salt, found.digest)

    def digests(self) -> dict[str, str]:
        """The hash of each adapter's numbers, by name."""
        return {name: entry.digest for name, entry in self._by_name.items()}

    def load(self, name: str, path: str, used: Collection[int]) -> None:
        """Load an adapter. used: the slots of open sequences.

        Raises InvalidField if the name is taken or no slot is free, and what reading the files raises.
        """
        if name in self._by_name:
            raise InvalidField(
                f"lora_name: the adapter {name!r} is loaded already; unload it first", "lora_name"
            )
        self.release(used)
        taken = {entry.slot for entry in self._by_name.values()} | self._unloaded
        slot = next((i for i in range(1, self.num_slots + 1) if i not in taken), None)
        if slot is None:
            raise InvalidField(
                f"lora_name: all {self.num_slots} places for adapters are taken (--max-loras); unload one, "
                "and wait for its open requests",
                "lora_name",
            )
        self._by_name[name] = LoadedAdapter(slot, self._load(slot, path))

    def unload(self, name: str, used: Collection[int]) -> None:
        """Take an adapter's name away; open requests go on. Raises ModelNotFound."""
        entry = self.find(name)
        del self._by_name[name]
        self._unloaded.add(entry.slot)
        self.release(used)

    def change(self, name: str, path: str | None, used: Collection[int]) -> None:
        """Load the adapter at a path, or with None unload it. Raises as these do."""
        if path is None:
            self.unload(name, used)
        else:
            self.load(name, path, used)

    def restore(self, name: str, path: str | None, used: Collection[int]) -> None:
        """Make a name what it was in an engine before: see `change`. Raises as it does."""
        if name in self._by_name:
            self.unload(name, used)
        if path is not None:
            self.load(name, path, used)

    def release(self, used: Collection[int]) -> None:
        """Free the slots of unloaded adapters that no sequence uses."""
        for slot in self._unloaded - set(used):
            self._clear(slot)
            self._unloaded.discard(slot)


def parse_named(text: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH. Raises ConfigError."""
    name, equals, path = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"lora: {text!r}: it is written NAME=PATH")
    if (why := why_no_name(name)) is not None:
        raise ConfigError(f"lora: {why}")
    return name, path


def why_no_name(name: str) -> str | None:
    """Why no request could ask for an adapter of that name; None: one can."""
    if NAME.fullmatch(name):
        return None
    return (
        f"{name[:200]!r}: a name has 1 to 200 letters, digits and . _ : / - and begins with a letter or digit"
    )


def _refuse(slot: int, path: str) -> str:
    raise ConfigError("this model was loaded without adapters; start it with --lora or --lora-folder")


def no_adapters() -> AdapterTable:
    """Of an engine without any."""
    return AdapterTable(0, _refuse, lambda slot: None)
