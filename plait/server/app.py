"""The HTTP application: routes, and what is common to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait import __version__
from plait.config import ServerConfig
from plait.errors import Cancelled
from plait.server import assets, chat, completions, models, openapi, validate
from plait.server.body import linger, read_object
from plait.server.edge import Edge
from plait.server.endpoint import Endpoint
from plait.server.loading import Loading
from plait.server.metrics import exposition
from plait.server.problems import BodyTooLarge, http_problem, json_response, problem
from plait.server.reply import respond
from plait.server.schema import present

if TYPE_CHECKING:
    from plait.engine.front import Front

IGNORED_HEADER = "x-plait-ignored"
Handler = Callable[[Request], Awaitable[Response]]
ENDPOINTS = (*completions.ENDPOINTS, *chat.ENDPOINTS, *models.ENDPOINTS)


def create_app(front: Front | Loading, config: ServerConfig) -> Starlette:
    """The application over a model, or over one that is still loading."""
    service = Service(front if isinstance(front, Loading) else Loading(front), config)
    routes = [
        _route("/health", service.health, "GET"),
        _route("/version", service.version, "GET"),
        _route("/metrics", service.metrics, "GET"),
        _route("/v1/models", service.list_models, "GET"),
        _route("/v1/models/{id:path}", service.get_model, "GET"),
        *(_route(endpoint.path, service.serves(endpoint), "POST") for endpoint in ENDPOINTS),
        *assets.routes(),
        *openapi.routes(ENDPOINTS),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _any_error})
    app.router.redirect_slashes = False
    app.add_middleware(Edge, host=config.host)
    return app


class Service:
    """What the handlers share: the model, once it is there, and the server's limits."""

    def __init__(self, loading: Loading, config: ServerConfig) -> None:
        self._loading, self._config = loading, config

    def served(self, front: Front) -> str:
        """The name clients ask for."""
        return self._config.served_model_name or front.name

    async def health(self, request: Request) -> Response:
        status, body = self._loading.health()
        return json_response(body, status, {"Cache-Control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        return await asyncio.to_thread(exposition, self._loading)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def list_models(self, request: Request) -> Response:
        front = self._loading.ready()
        return json_response({"object": "list", "data": [models.card(front, self.served(front))]})

    async def get_model(self, request: Request) -> Response:
        front = self._loading.ready()
        models.check(request.path_params["id"], self.served(front))
        return json_response(models.card(front, self.served(front)))

    def serves(self, endpoint: Endpoint) -> Handler:
        """A handler that generates what `plan` makes of the body, or computes `answer` in a thread."""

        async def handle(request: Request) -> Response:
            front, body = await self._read(request)
            served, plan, answer = self.served(front), endpoint.plan, endpoint.answer
            if plan is not None:
                response = await respond(request.receive, front, lambda: plan(front, served, body))
            else:
                assert answer is not None
                response = json_response(await asyncio.to_thread(answer, front, served, body))
            return _reporting(response, body, endpoint.fields)

        return handle

    async def _read(self, request: Request) -> tuple[Front, dict[str, Any]]:
        body = present(await read_object(request, self._config.max_body_bytes))
        front = self._loading.ready()
        models.check(body.get("model"), self.served(front))
        return front, body


class _Endpoint:
    """An ASGI endpoint: a handler whose every exception becomes the error object."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._handler(request)
        except BodyTooLarge as error:
            await _refuse_body(request, error, send)
            return
        except Exception as error:
            response = problem(error).response()
            if isinstance(error, Cancelled):
                response.headers["Connection"] = "close"
        await response(scope, receive, send)


def _route(path: str, handler: Handler, method: str) -> Route:
    return Route(path, _Endpoint(handler), methods=[method])


def _reporting(response: Response, body: Mapping[str, Any], fields: frozenset[str]) -> Response:
    if names := validate.ignored(body, fields):
        response.headers[IGNORED_HEADER] = names
    return response


async def _refuse_body(request: Request, error: BodyTooLarge, send: Send) -> None:
    """Answer first and end the response a moment later: closing on a body in flight would lose the answer."""
    response = problem(error).response()
    await send(
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await linger(request)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    where = f"{request.method} {request.url.path[:200]}"
    texts = {
        404: f"{where}: there is no such path; see /v1/models, /v1/completions, /v1/chat/completions",
        405: f"{where}: this path takes {(headers or {}).get('Allow', 'another method')}",
    }
    return http_problem(status, texts.get(status, where), headers).response()


async def _any_error(request: Request, error: Exception) -> Response:
    return problem(error).response()
