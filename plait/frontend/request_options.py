"""Terms on which a request is served: shared cache, priority and time limit.

Apart from `SamplingParams`, which describes how tokens are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import InvalidField

MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Terms:
    """`cache_salt` and `priority` are vLLM's. Raises InvalidField, naming the field.

    cache_salt: only requests with the same one share what was computed; None: those without one share.
    priority: lower runs first. timeout_s: seconds from its arrival, the queue included, after which it ends
    with an error; None: as long as it takes.
    """

    cache_salt: str | None = None
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_salt(self.cache_salt)
        _check_priority(self.priority)
        _check_timeout(self.timeout_s)


def _check_salt(salt: str | None) -> None:
    # An empty salt is a tenant's id that was not filled in: it must not mean sharing with every tenant.
    if salt is None:
        return
    if not isinstance(salt, str):
        raise InvalidField(f"cache_salt: a {type(salt).__name__} is not a string", "cache_salt")
    if not 1 <= len(salt) <= MAX_SALT_CHARS:
        text = f"cache_salt: it has {len(salt)} characters; send 1 to {MAX_SALT_CHARS}, or leave it out"
        raise InvalidField(text, "cache_salt")
    if not (salt.isascii() and salt.isprintable()):
        raise InvalidField("cache_salt: only printable ASCII characters can be in it", "cache_salt")


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidField(f"priority: {priority!r} is not a whole number", "priority")
    if abs(priority) > MAX_PRIORITY:
        raise InvalidField(f"priority: it is outside [-{MAX_PRIORITY}, {MAX_PRIORITY}]", "priority")


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise InvalidField(f"timeout_s: {timeout_s!r} is not a number of seconds", "timeout_s")
    if not 0 < timeout_s < math.inf:
        raise InvalidField(f"timeout_s: {timeout_s} is not more than 0 seconds, or not finite", "timeout_s")


NO_TERMS = Terms()
