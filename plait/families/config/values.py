"""Values of a config by their kind: flags, counts, numbers and words, refused by name if they are others."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel
from plait.families.config.normalize import Config, IncompleteConfig


def is_set(config: Mapping[str, object], key: str, *, usual: bool = False) -> bool:
    """A flag of a config. Raises UnsupportedModel for what is neither true nor false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, not true or false")
    return usual if value is None else value


def read_count(config: Mapping[str, object], key: str, usual: int | None, least: int, most: int) -> int:
    """A whole number of a config. Raises UnsupportedModel for one that is missing, or outside."""
    value = config.get(key, usual)
    if value is None:
        raise UnsupportedModel(f"the file has no {key}, which such a head needs")
    if type(value) is not int or not least <= value <= most:
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, not a number from {least} to {most}")
    return value


def read_number(config: Mapping[str, object], key: str, least: float, most: float) -> float:
    """A number of a config. Raises UnsupportedModel for one that is missing, none, or outside."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        wanted = f"a number from {least:g} to {most:g}"
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, not {wanted}; --set {key}=… corrects it")
    return float(value)


def require_given(c: Config, name: str, **known: tuple[object, ...]) -> None:
    """Raises UnsupportedModel for a key without one of these values, IncompleteConfig for an absent one.

    No code says what is meant where such a key is null or absent.
    """
    for key, values in known.items():
        if (value := c.get(key)) is None:
            raise IncompleteConfig(
                f"config.json does not say {key!r}, which {name} needs; give it with --set {key}=VALUE",
                key,
            )
        if value not in values:
            listed = ", ".join(map(str, values))
            raise UnsupportedModel(f"{key} = {value!r:.80} is not implemented for {name}; known: {listed}")
