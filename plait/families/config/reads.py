"""Which keys of a config a model reads: of any other one, --set would change nothing in silence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping

from plait.errors import ConfigError
from plait.families.config.normalize import NOTHING, Config


class ReadConfig(Config):
    """A config that records in `reads` which of its keys are looked up, until one is written anew.

    A key that was made of others stands for these: `made`. A copy of all of it reads every key.
    """

    def __init__(
        self, values: Mapping[str, object], reads: set[str], made: Mapping[str, Collection[str]] = NOTHING
    ) -> None:
        super().__init__(values)
        self.reads, self.made = reads, dict(made)

    def _record(self, key: str) -> None:
        self.reads.update(self.made.get(key, (key,)))

    def __getitem__(self, key: str) -> object:
        self._record(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        self._record(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._record(str(key))
        return super().__contains__(key)

    def pop(self, key: str, *default: object) -> object:
        self._record(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self._record(key)
            yield key

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        self.made[key] = ()  # what it was made of was read by then

    def __or__(self, other: Mapping[str, object]) -> ReadConfig:  # type: ignore[override]
        made = {**self.made, **dict.fromkeys(other, ())}
        return ReadConfig({**dict(self.items()), **other}, self.reads, made)

    def make(self, key: str, how: Callable[[Config], object]) -> None:
        before = set(self.reads)
        self.reads.clear()
        self[key] = how(self)
        self.made[key] = {key, *self.reads}
        self.reads.clear()
        self.reads.update(before)


def as_unread(key: str, family: str, read: Collection[str], instead: str = "") -> ConfigError:
    """The error of --set for a key that a model does not read. `instead`: what to set, if no near key."""
    hint = instead or list_near(key, read)
    return ConfigError(f"--set {key}=…: this model, of the family {family}, does not read it{hint}")


def list_near(key: str, known: Collection[str]) -> str:
    """The keys of those known that are most like this one, to be appended to a message."""
    near = difflib.get_close_matches(key.rpartition(".")[2], sorted(known), 3)
    return f"; near keys that are read: {', '.join(near)}" if near else ""
