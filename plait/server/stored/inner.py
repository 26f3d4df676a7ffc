"""The application for requests that the server itself makes, under a client's key: those of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.server.gateway.exchange import SCOPE_KEY, Exchange
from plait.server.gateway.middleware import REQUEST_ID_HEADER
from plait.server.http.transfer import new_id

if TYPE_CHECKING:
    from plait.server.gateway.api_keys import Account, Key
    from plait.server.gateway.middleware import Traffic


class InnerApp(Struct, frozen=True):
    """Routes requests with `key` as if it had been sent. They are counted, logged and paid for by that key.

    They take none of its requests a minute, because a batch waits for its tokens anyway.
    """

    app: ASGIApp
    traffic: Traffic
    key: Key
    account: Account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(
            new_id("req"),
            scope["method"],
            scope["path"],
            key=self.key,
            account=self.account,
            route=scope["path"],
        )

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = exchange.id
            await send(message)

        self.traffic.begin_inner(exchange)
        try:
            await self.app({**scope, SCOPE_KEY: exchange}, receive, named)
        finally:
            self.traffic.end(exchange)
