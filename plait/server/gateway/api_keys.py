"""API keys: which clients may use the server, under what name, with what limits.

A key is kept as its SHA-256 and compared in constant time. Its name, no secret, is what logs show and what
keeps one key's cached prompts from another's. A request pays for its prompt when it is submitted, and for its
output when it ends. So a bucket may go below zero, and a key that overdrew waits longer. There is one
`Account` for each key, so memory is bounded by the number of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.http.errors import RateLimited

MAX_KEYS = 10_000  # each is compared with every request: this many take some milliseconds
ADMIN = "admin"  # the name of the admin key, in the log
DIGEST_MARK = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_WORDS = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "open": "max_requests"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The limits of one key; None: no limit. A request is a POST; tokens are prompt and output."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """An API key. `digest`: SHA-256 of the secret."""

    name: str
    digest: bytes
    allowance: Allowance = Allowance()


ANYBODY = Key("", b"")  # all clients of a server without keys: they share one allowance


class Keyring:
    """The accepted keys. Without any, every client is served, with the allowance of `everybody`."""

    def __init__(self, keys: Iterable[Key] = (), everybody: Allowance | None = None) -> None:
        self.keys = tuple(keys)
        self.anybody = replace(ANYBODY, allowance=everybody or Allowance())

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, headers: Mapping[str, str]) -> Key | None:
        """The key that a request carries, in `Authorization: Bearer` or `x-api-key`; None: none of ours."""
        if not self.keys:
            return self.anybody
        found = None
        for secret in _secrets(headers):
            digest = hashlib.sha256(secret.encode("latin-1")).digest()  # the bytes of a header
            for key in self.keys:  # all of them, whichever is right
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def find_name(self, name: str) -> Key | None:
        """The key of this name; None: it is no longer one of this server's."""
        return next((key for key in self.keys or (self.anybody,) if key.name == name), None)


def read_keys(config: ServerConfig) -> Keyring:
    """The keys of `api_key` and, as it is now, of `api_key_file`. Raises ConfigError, which shows no key."""
    default = Allowance(
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_requests=config.max_requests_per_key,
    )
    keys = [_key(text, default, f"api_key {i}") for i, text in enumerate(config.api_key, 1)]
    if config.api_key_file is not None:
        from_file = list(_from_file(config.api_key_file, default))
        if not from_file:
            raise ConfigError(
                f"api_key_file: {config.api_key_file} holds no key, and would let every client in"
            )
        keys += from_file
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"api_key_file: {len(keys)} keys are more than {MAX_KEYS}")
    _check_unique(keys)
    return Keyring(keys, default)


@lru_cache(maxsize=2)
def read_admin_key(config: ServerConfig) -> Keyring:
    """The key that `--admin-key` sets, alone: KEY or sha256:HEX. Raises ConfigError, which shows no key."""
    if config.admin_key is None:
        return Keyring()
    return Keyring([replace(_key(config.admin_key, Allowance(), "admin_key"), name=ADMIN)])


def _from_file(path: str, default: Allowance) -> Iterator[Key]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield _key(line, default, f"api_key_file: line {number}")


def _key(text: str, default: Allowance, where: str) -> Key:
    """Parse the line of a key: `[NAME:] KEY | sha256:HEX [rpm=N] [tpm=N] [open=N]`."""
    words = text.split()
    joined = " ".join(word for word in words if "=" not in word or word.partition("=")[0] not in _WORDS)
    allowance = replace(default, **dict(_limit(word, where) for word in words if _is_limit(word)))
    name, colon, secret = joined.partition(":")
    if not colon or joined.startswith(DIGEST_MARK):
        name, secret = "", joined
    name, secret = name.strip(), secret.strip()
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, dots, dashes; or is left out")
    if not secret or " " in secret or not secret.isprintable():
        raise ConfigError(f"{where}: write KEY, NAME: KEY or NAME: sha256:HEX, then rpm=, tpm=, open=")
    digest = _digest(secret, where)
    return Key(name or _nameless(digest), digest, allowance)


def _digest(secret: str, where: str) -> bytes:
    if not secret.startswith(DIGEST_MARK):
        return hashlib.sha256(secret.encode()).digest()
    text = secret.removeprefix(DIGEST_MARK)
    if not _DIGEST.fullmatch(text):
        raise ConfigError(f"{where}: after {DIGEST_MARK} come the 64 hexadecimal digits of a key's SHA-256")
    return bytes.fromhex(text)


def _nameless(digest: bytes) -> str:
    # A name that stays the same when lines move: the cache of a key must not become another's.
    return "key-" + hashlib.sha256(b"name of " + digest).hexdigest()[:8]


def _is_limit(word: str) -> bool:
    return word.partition("=")[0] in _WORDS and "=" in word


def _limit(word: str, where: str) -> tuple[str, int]:
    name, _, value = word.partition("=")
    if not (value.isascii() and value.isdigit() and len(value) <= 12 and int(value) > 0):
        raise ConfigError(f"{where}: {name}= takes a whole number of at least 1")
    return _WORDS[name], int(value)


def _check_unique(keys: Iterable[Key]) -> None:
    digests: dict[bytes, str] = {}
    names: set[str] = set()
    for key in keys:
        if key.digest in digests:
            raise ConfigError(f"api_key: {key.name} and {digests[key.digest]} are the same key")
        if key.name in names:
            raise ConfigError(f"api_key: two keys have the name {key.name}")
        digests[key.digest] = key.name
        names.add(key.name)


def _secrets(headers: Mapping[str, str]) -> Iterator[str]:
    scheme, _, secret = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        yield secret.strip()
    if secret := headers.get("x-api-key", "").strip():
        yield secret


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
        self.num_open = self.num_requests = 0
        self.last_used: float | None = None  # seconds since 1970
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

    def see(self) -> None:
        """Count a request that came with the key, whether or not it is admitted."""
        self.num_requests += 1
        self.last_used = time.time()

    def count_remaining(self) -> tuple[int | None, int | None]:
        """Requests and tokens that may be used now; None: no limit."""
        now = self._clock()
        requests, tokens = (
            None if bucket is None else max(0, math.floor(bucket.level(now)))
            for bucket in (self._requests, self._tokens)
        )
        return requests, tokens

    def wait_s(self) -> float:
        """Seconds until tokens may be used again: for work that the server does for the key by itself."""
        return 0.0 if self._tokens is None else self._tokens.wait_s(0.001, self._clock())

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
