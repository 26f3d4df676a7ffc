"""API keys: which clients may use the server, under what name, with what limits.

A key is kept as its SHA-256 and compared in constant time. Its name, no secret, is what logs show and
what keeps one key's cached prompts from another's.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from plait.config import ServerConfig
from plait.errors import ConfigError

MAX_KEYS = 10_000  # each is compared with every request: this many take some milliseconds
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
            raise ConfigError(f"api_key_file: {config.api_key_file} holds no key, and would let anybody in")
        keys += from_file
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"api_key_file: {len(keys)} keys are more than {MAX_KEYS}")
    _check_unique(keys)
    return Keyring(keys, default)


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
