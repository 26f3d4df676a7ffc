"""https: a certificate that can be replaced while connections live."""

from __future__ import annotations

import logging
import os
import ssl

from plait.config import ServerConfig
from plait.errors import ConfigError

logger = logging.getLogger("plait.server")


class Certificate:
    """The server's certificate and key, as TLS uses them. New handshakes use what was loaded last."""

    def __init__(self, cert: str, key: str) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        self._cert, self._key = cert, key
        self._loaded = self._stamp()
        self._load()

    def reload(self) -> None:
        """Load the files as they are now. Raises ConfigError, and keeps what was loaded before."""
        self._loaded = self._stamp()
        self._check()
        self._load()
        logger.info("the TLS certificate was loaded again")

    def reload_changed(self) -> None:
        """Load the files if they are others than at the last time; a failure is logged."""
        if self._stamp() == self._loaded:
            return
        try:
            self.reload()
        except ConfigError as error:
            logger.error("%s; the certificate of before stays in use", error)

    def _check(self) -> None:
        """Try them in a context of their own: half a change must not reach the one in use."""
        _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._cert, self._key)

    def _load(self) -> None:
        _load_chain(self.context, self._cert, self._key)

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return _file_stamp(self._cert), _file_stamp(self._key)


def certificate(config: ServerConfig) -> Certificate | None:
    """None: plain HTTP. Raises ConfigError for files that cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificate(config.tls_cert, config.tls_key)


def _load_chain(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        text = f"tls_cert, tls_key: {cert} and {key} cannot be used: {error}"
        raise ConfigError(text) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not, readable by the server alone")


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
