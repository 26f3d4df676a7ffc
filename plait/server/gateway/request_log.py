"""Requests that have ended: the log's line of each, and the last ones in memory for the operator."""

from __future__ import annotations

from collections import deque

from plait.server.gateway.access_log import QUIET_ROUTES, log_request, shows_requests
from plait.server.gateway.exchange import Exchange, log_fields

MAX_LOGGED = 1000  # some hundred bytes each


class RequestLog:
    """The last requests, as `log_fields` describes them: no prompt, no reply and no secret is in it.

    Only for the event loop's thread.
    """

    def __init__(self, capacity: int = MAX_LOGGED) -> None:
        self._lines: deque[dict[str, object]] = deque(maxlen=capacity)

    def record(self, exchange: Exchange, seconds: float) -> None:
        """Keep a request that has ended and write its line of the log, unless it is no news."""
        route, is_quiet = exchange.route, exchange.is_quiet
        is_kept = not is_quiet and route not in QUIET_ROUTES
        if not is_kept and not shows_requests(route, is_quiet=is_quiet):
            return
        fields = log_fields(exchange, seconds)
        if is_kept:
            shown = {name: value for name, value in fields.items() if value not in (None, "", ())}
            self._lines.append({"time": exchange.began_ns / 1e9, **shown})
        log_request(fields, route, is_quiet=is_quiet)

    def find(self, limit: int, *, id: str = "", key: str = "") -> list[dict[str, object]]:
        """At most `limit` lines, the latest first: those with this id and of this key, if they are given."""
        found = []
        for line in reversed(self._lines):
            if (not id or line.get("id") == id) and (not key or line.get("key") == key):
                found.append(line)
                if len(found) == limit:
                    break
        return found
