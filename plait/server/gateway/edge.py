"""The outermost layer of the application: it asks the gate of each request, and reports its end."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.errors import PlaitError
from plait.server.gateway.exchange import SCOPE_KEY, Exchange
from plait.server.gateway.middleware import REQUEST_ID_HEADER, RequestGate, Traffic
from plait.server.gateway.served_models import ServedModels
from plait.server.http.errors import problem
from plait.server.http.transfer import REQUEST_ID


class Edge:
    """Wraps the application: each request that its `gate` admits has an id, and its end is reported."""

    def __init__(self, app: ASGIApp, gate: RequestGate, traffic: Traffic, models: ServedModels) -> None:
        self._app, self._gate, self._traffic, self._models = app, gate, traffic, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), self._gate.path_of(scope)
        exchange = self._gate.exchange(scope, headers, path)
        scope[REQUEST_ID] = exchange.id  # for its connection, which has this very scope
        scope = {**scope, "path": path, "raw_path": path.encode(), SCOPE_KEY: exchange}
        self._traffic.begin(exchange)
        try:
            app: ASGIApp = self._app
            try:
                self._gate.check(scope, headers, exchange)
                if not self._models.stopping:
                    self._traffic.work(exchange)
            except PlaitError as error:
                exchange.reason = problem(error).reason
                app = self._gate.answer_to(error, path)
            await app(scope, receive, self._add_headers(exchange, send))
        finally:
            self._traffic.end(exchange)

    def _add_headers(self, exchange: Exchange, send: Send) -> Send:
        """`send` with the headers that every answer has."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = exchange.id
                if exchange.account is not None:
                    headers.update(exchange.account.headers())
                if self._models.stopping:
                    headers["Connection"] = "close"
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                exchange.is_whole = True

        return named
