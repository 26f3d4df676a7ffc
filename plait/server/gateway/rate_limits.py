"""Rate limits of each key: requests and tokens a minute, in buckets that refill, and open requests.

A request is admitted while its key has tokens left. It pays for its prompt when it is submitted, and for its
output when it ends. So a bucket may go below zero, and a key that overdrew waits longer. There is one
`Account` for each key, so memory is bounded by the number of keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from plait.server.gateway.api_keys import Allowance, Key
from plait.server.http.errors import RateLimited

MINUTE_S = 60.0
HEADERS = tuple(
    f"x-ratelimit-{word}-{what}"
    for what in ("requests", "tokens")
    for word in ("limit", "remaining", "reset")
)
Clock = Callable[[], float]


class Bucket:
    """Holds up to `capacity`, and gets as much each minute. Not for more than one thread."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level, self._at = float(capacity), now

    def level(self, now: float) -> float:
        """The amount in it; below zero: what is owed."""
        filled = self._level + (now - self._at) * self.capacity / MINUTE_S
        self._level, self._at = min(filled, float(self.capacity)), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take an amount, also below zero."""
        self._level = self.level(now) - amount

    def resize(self, capacity: int, now: float) -> None:
        """Change the capacity; what was used stays used."""
        used = self.capacity - self.level(now)
        self.capacity, self._level = capacity, capacity - used

    def wait_s(self, wanted: float, now: float) -> float:
        """Seconds until it holds `wanted`."""
        return max(0.0, wanted - self.level(now)) * MINUTE_S / self.capacity


class Account:
    """What one key has used. Only for the event loop's thread."""

    def __init__(self, allowance: Allowance, clock: Clock) -> None:
        self.num_open = 0
        self._clock, self._max_open = clock, allowance.max_requests
        now = clock()
        self._requests = _bucket(allowance.requests_per_minute, now)
        self._tokens = _bucket(allowance.tokens_per_minute, now)

    def admit(self) -> None:
        """Count one more request, which `leave` ends. Raises RateLimited, which has the time to retry."""
        now = self._clock()
        if self._max_open is not None and self.num_open >= self._max_open:
            text = f"this key has {self.num_open} requests open and may have {self._max_open}"
            raise RateLimited(f"{text}; wait until one is done", 1.0, self.headers())
        for what, bucket, wanted in (("requests", self._requests, 1.0), ("tokens", self._tokens, 0.001)):
            if bucket is None or bucket.level(now) >= wanted:
                continue
            wait_s = bucket.wait_s(wanted, now)
            text = f"this key may use {bucket.capacity} {what} a minute and has used them"
            raise RateLimited(f"{text}; try again in {wait_s:.1f} s", wait_s, self.headers())
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.num_open += 1

    def leave(self) -> None:
        self.num_open -= 1

    def pay(self, num_tokens: int) -> None:
        """Take tokens that were used."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def change(self, allowance: Allowance) -> None:
        """Change the allowance."""
        now, self._max_open = self._clock(), allowance.max_requests
        self._requests = _resize_bucket(self._requests, allowance.requests_per_minute, now)
        self._tokens = _resize_bucket(self._tokens, allowance.tokens_per_minute, now)

    def headers(self) -> Mapping[str, str]:
        """`x-ratelimit-…` as OpenAI has them, for what is limited."""
        now, found = self._clock(), {}
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.capacity)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
                found[f"x-ratelimit-reset-{what}"] = _span(bucket.wait_s(bucket.capacity, now))
        return found


class RateLimits:
    """The accounts of all keys, by name."""

    def __init__(self, keys: Iterable[Key], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._accounts = {key.name: Account(key.allowance, clock) for key in keys}

    def account(self, key: Key) -> Account:
        return self._accounts[key.name]

    def change(self, keys: Iterable[Key]) -> None:
        """Replace the keys: those that stay keep their usage; open requests of removed keys may end."""
        kept = self._accounts
        self._accounts = {}
        for key in keys:
            account = kept.get(key.name)
            if account is None:
                account = Account(key.allowance, self._clock)
            else:
                account.change(key.allowance)
            self._accounts[key.name] = account


def _bucket(capacity: int | None, now: float) -> Bucket | None:
    return None if capacity is None else Bucket(capacity, now)


def _resize_bucket(bucket: Bucket | None, capacity: int | None, now: float) -> Bucket | None:
    if bucket is None or capacity is None:
        return _bucket(capacity, now)
    bucket.resize(capacity, now)
    return bucket


def _span(seconds: float) -> str:
    """A duration as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{shown}s" if minutes else f"{shown}s"
