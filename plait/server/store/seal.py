"""Encryption at rest: AES-256-GCM of every body in the store, with `--store-key FILE`.

A sealed body is a nonce of 12 random bytes, then the ciphertext with its tag of 16 bytes. The additional data
is the body's place (id, tenant, name, number), so that no body can be moved to another place unseen. Ids,
tenants, times, sizes, states and names of models stay readable, because the database searches them.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from plait.errors import ConfigError
from plait.server.store.errors import StoreUnavailable

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
HINT = "write 64 hexadecimal digits into it, as `openssl rand -hex 32` prints them"


class Cipher(Protocol):
    """AES-GCM, as `cryptography` has it."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...


class Seal:
    """Seals bodies. `cipher` None: bodies stay as they are. Safe from any thread."""

    def __init__(self, cipher: Cipher | None = None) -> None:
        self._cipher = cipher

    @property
    def num_added(self) -> int:
        """Bytes that a sealed body has more than its own."""
        return 0 if self._cipher is None else NONCE_BYTES + TAG_BYTES

    def __bool__(self) -> bool:
        return self._cipher is not None

    def close(self, body: bytes, place: str) -> bytes:
        """The body as the file has it."""
        if self._cipher is None:
            return body
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, body, place.encode())

    def open(self, sealed: bytes, place: str) -> bytes:
        """The body again. Raises StoreUnavailable where it was changed, moved, or sealed by another key."""
        if self._cipher is None:
            return sealed
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place.encode())
        except Exception as error:  # its own type of error is known only where the library is installed
            text = "the store's file was changed, or --store-key is another key: an entry cannot be read"
            raise StoreUnavailable(text) from error


def read_seal(path: str | None) -> Seal:
    """The seal of a file with a key; None: no encryption. Raises ConfigError, which shows no key."""
    if path is None:
        return Seal()
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        text = "store_key: encryption needs the library cryptography; pip install 'plait-engine[store]'"
        raise ConfigError(text) from error
    return Seal(AESGCM(_read_key(path)))


def _read_key(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(1024)
    except OSError as error:
        raise ConfigError(f"store_key: {path} cannot be read: {error.strerror}") from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError(f"store_key: {path} can be read by other users; chmod 600 it")
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        raise ConfigError(f"store_key: {path} holds no key; {HINT}") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"store_key: the key in {path} has {len(key)} bytes, not {KEY_BYTES}; {HINT}")
    return key
