"""The HTTP application: its routes, and the handling that all of them share."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait.config import ServerConfig
from plait.errors import Cancelled, ConfigError, DeadlineExceeded
from plait.fair_queue import FairThreads, Slices, SliceTurns, current_client
from plait.server import pages
from plait.server.anthropic import messages
from plait.server.api import validate, versions
from plait.server.api.endpoint import Answer, Endpoint, ModelLookup, ModelsLookup
from plait.server.api.manage import manage_models
from plait.server.api.parse_fields import find_aliases, name_as_sent
from plait.server.api.reply import WARNING_HEADER
from plait.server.gateway import api_keys
from plait.server.gateway.edge import Edge
from plait.server.gateway.exchange import SCOPE_KEY, SHOWN_LOAD_S, Exchange
from plait.server.gateway.exposition import exposition
from plait.server.gateway.middleware import REQUEST_ID_HEADER, Refusal, RequestGate, Traffic
from plait.server.gateway.operator_views import VIEWS, OperatorView
from plait.server.gateway.request_context import Health, LoadingState, Readiness, RequestContext
from plait.server.gateway.served_models import ChosenModel, ServedModels
from plait.server.http.errors import BodyTooLarge, http_problem, json_response, problem
from plait.server.http.transfer import read_object, refuse_body, until_disconnect
from plait.server.llamacpp import completion, infill, server_facts
from plait.server.mcp.allowed import McpServers
from plait.server.mcp_routes import MCP, McpDesk
from plait.server.models import admin
from plait.server.models.only import OnlyModel
from plait.server.ollama import embed, generate, manage, wire
from plait.server.openai import adapters, chat, completions, embeddings, models, render, scores
from plait.server.respond import respond
from plait.server.responses import endpoints
from plait.server.stored import batches, chats, conversations, files, responses

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.server.stored.state import StoredState

# Sent to pages of other origins.
EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    validate.IGNORED_HEADER,
    WARNING_HEADER,
    "retry-after",
    "retry-after-ms",
    *api_keys.HEADERS,
)
PLAN_THREADS = max(min(32, (os.cpu_count() or 1) + 4), 3)  # as many as Python's own executor has
MAX_WAIT_S = 1e6  # a request's timeout_s above it is none for waiting
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
PATHS = (
    "see /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/models, and "
    "/docs for all"
)
Handler = Callable[[Request], Awaitable[Response]]
STORED = (*responses.ROUTES, *conversations.ROUTES, *chats.ROUTES, *files.ROUTES, *batches.ROUTES)
ENDPOINTS = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *scores.ENDPOINTS,
    *endpoints.ENDPOINTS,
    *messages.ENDPOINTS,
    *models.ENDPOINTS,
    *adapters.ENDPOINTS,
    *render.ENDPOINTS,
    *generate.ENDPOINTS,
    *embed.ENDPOINTS,
    *manage.ENDPOINTS,
    *completion.ENDPOINTS,
    *infill.ENDPOINTS,
    *admin.ENDPOINTS,
)
FACTS = server_facts.FACTS
LISTS = (*manage.LISTS, *admin.LISTS)


def create_app(
    served: Front | LoadingState | ServedModels,
    config: ServerConfig,
    traffic: Traffic | None = None,
    state: StoredState | None = None,
) -> Starlette:
    """The application over a model, one that is still loading, or several. `state`: of its store."""
    if isinstance(served, ServedModels):
        models = served
    else:
        loading = served if isinstance(served, LoadingState) else LoadingState(served)
        models = OnlyModel(loading, config)
    traffic = traffic or Traffic(config)
    desk = McpDesk(McpServers.of(config), config.max_body_bytes)
    service = Service(models, config, traffic, state, desk.servers)
    routes = [
        _route("/health", service.health, "GET"),
        _route("/ready", service.ready, "GET"),
        _route("/live", service.live, "GET"),
        _route("/version", service.version, "GET"),
        _route("/metrics", service.metrics, "GET"),
        _route("/v1/models", service.list_models, "GET"),
        _route("/v1/models/{id:path}", service.get_model, "GET"),
        _route("/tokenizer_info", service.tokenizer_info, "GET"),
        *(_route(e.path, service.serves(e), e.method, e.refusal) for e in ENDPOINTS),
        *(_route(e.path, service.looks_up(e), "GET", e.refusal) for e in FACTS),
        *(_route(r.path, r.handler(state), r.method) for r in STORED),
        *(_route(r.path, r.handler(desk), r.method) for r in MCP),
        *(_route(e.path, service.lists(e), "GET", e.refusal) for e in LISTS),
        *(_route(view.path, service.views(view), "GET") for view in VIEWS),
        *pages.page_routes(),
        *pages.api_routes(ENDPOINTS),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _any_error})
    app.router.redirect_slashes = False
    shapes = [(e.path, e.refusal) for e in ENDPOINTS] + [(e.path, e.refusal) for e in FACTS]
    shapes += [(e.path, e.refusal) for e in LISTS]
    refusals = {path: refusal for path, refusal in shapes if refusal is not None}
    generating = [e.path for e in ENDPOINTS if e.plan is not None]
    managing = [e.path for e in ENDPOINTS if e.needs_admin] + [e.path for e in LISTS if e.needs_admin]
    managing += [view.path for view in VIEWS]
    either = [e.path for e in ENDPOINTS if e.admin is not None]
    gate = RequestGate(traffic, models, routes, refusals, generating, managing, either)
    app.add_middleware(Edge, gate=gate, traffic=traffic, models=models)
    app.state.reject_early = gate.reject_early  # for a server that can reject before it starts a task
    if config.cors_origin:
        _allow_origins(app, config.cors_origin, may_delete=state is not None)
    return app


def _allow_origins(app: Starlette, origins: Sequence[str], *, may_delete: bool) -> None:
    """Let pages of these origins call the server. Raises ConfigError for what no browser sends as one."""
    for origin in origins:
        if origin not in {"*", "null"} and not _ORIGIN.fullmatch(origin):
            wanted = "browsers send https://app.example, in lower case and without a slash at the end"
            raise ConfigError(f"cors_origin: {origin!r} is no origin; {wanted}; *: any page")
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE") if may_delete else ("GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


class Service:
    """What the handlers share: the models, and the server's limits."""

    def __init__(
        self,
        models: ServedModels,
        config: ServerConfig,
        traffic: Traffic,
        state: StoredState | None,
        servers: McpServers,
    ) -> None:
        self._models, self._config, self._traffic, self._state = models, config, traffic, state
        self._mcp = servers
        self._turns = SliceTurns()
        self._threads = FairThreads(PLAN_THREADS, PLAN_THREADS - 2, "plait-plan")

    async def health(self, request: Request) -> Response:
        status, body = self._models.health()
        if self._traffic.keyring.find(request.headers) is None:
            body = Health(status=body.status)  # without a key, no numbers of the engine's load
        return json_response(body, status, {"Cache-Control": "no-store"})

    async def ready(self, request: Request) -> Response:
        status, why = self._models.readiness()
        return json_response(Readiness(why), status, {"Cache-Control": "no-store"})

    async def live(self, request: Request) -> Response:
        status, why = self._models.liveness()
        return json_response(Readiness(why), status, {"Cache-Control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        return await asyncio.to_thread(exposition, self._models, self._traffic)

    async def version(self, request: Request) -> Response:
        return json_response(versions.describe_version(self._models))

    async def list_models(self, request: Request) -> Response:
        found = models.list_cards(self._models.list_facts())
        return json_response(models.fit_list(found, request.headers))

    async def get_model(self, request: Request) -> Response:
        found = models.card(self._models.facts_of(request.path_params["id"]))
        return json_response(models.fit_card(found, request.headers))

    async def tokenizer_info(self, request: Request) -> Response:
        found = self._models.look_up(request.query_params.get("model"))
        return json_response(await asyncio.to_thread(models.tokenizer_info, found.front))

    def looks_up(self, facts: ModelLookup) -> Handler:
        """The handler of facts about a loaded model."""

        async def handle(request: Request) -> Response:
            found = self._models.look_up(request.query_params.get("model"))
            return json_response(await asyncio.to_thread(facts.answer, found.front, found.served))

        return handle

    def lists(self, facts: ModelsLookup) -> Handler:
        """The handler of facts about all models."""

        async def handle(request: Request) -> Response:
            return json_response(facts.answer(self._models.list_facts()))

        return handle

    def views(self, view: OperatorView) -> Handler:
        async def handle(request: Request) -> Response:
            return json_response(view.answer(self._traffic, self._models, request.query_params))

        return handle

    def serves(self, endpoint: Endpoint) -> Handler:
        """The handler of an endpoint: a reply by its `plan`, or its `answer` computed in a thread."""
        if endpoint.manage is not None:
            return self._manages(endpoint)

        async def handle(request: Request) -> Response:
            context, body = await self._read(request, endpoint)
            plan, answer, receive = endpoint.plan, endpoint.answer, request.receive
            if plan is not None:
                work = partial(plan, context, body)
                interval = self._config.stream_interval
                response = await respond(receive, context, work, self._threads, interval, self._state)
            else:
                assert answer is not None
                slices = self._turns.run(current_client.get(), _write_answer(answer, context, body))
                response = await until_disconnect(receive, slices)
            if names := validate.list_ignored(body, endpoint.fields, context.exchange.unread):
                response.headers[validate.IGNORED_HEADER] = names
            return response

        return handle

    def _manages(self, endpoint: Endpoint) -> Handler:
        async def handle(request: Request) -> Response:
            body = endpoint.read(await read_object(request, self._config.max_body_bytes, endpoint.any_type))
            return await manage_models(endpoint, self._models, body, request.scope[SCOPE_KEY])

        return handle

    async def _read(self, request: Request, endpoint: Endpoint) -> tuple[RequestContext, dict[str, object]]:
        sent = await read_object(request, self._config.max_body_bytes, endpoint.any_type)
        stays = sent.pop("keep_alive", None) if self._models.keeps_time else None
        exchange: Exchange = request.scope[SCOPE_KEY]
        exchange.aliases = find_aliases(sent)
        body = endpoint.read(sent)
        current_client.set(exchange.key.name or (request.client.host if request.client else ""))
        found = await self._choose(request, body, exchange, stays)
        exchange.model = found.served
        store = None if self._state is None else self._state.store
        return RequestContext(found.front, found.name, exchange, store, found.adapter, self._mcp), body

    async def _choose(
        self, request: Request, body: dict[str, object], exchange: Exchange, stays: object
    ) -> ChosenModel:
        """The request's model. The time until it is loaded is part of the request's timeout_s.

        Raises DeadlineExceeded, Cancelled, and what choosing raises.
        """
        choosing = self._models.choose(body.get("model"), exchange, stays)
        if not self._models.keeps_time:
            return await choosing
        limit, began, seconds = body.get("timeout_s"), time.monotonic(), None
        if isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < MAX_WAIT_S:
            seconds = float(limit)
        try:
            async with asyncio.timeout(seconds):
                found = await until_disconnect(request.receive, choosing)
        except TimeoutError as error:
            raise DeadlineExceeded("timeout_s: it was over before the model was loaded") from error
        waited_s = time.monotonic() - began
        exchange.load_s = waited_s if waited_s >= SHOWN_LOAD_S else 0.0
        if seconds is not None:
            body["timeout_s"] = max(seconds - waited_s, 0.001)
        return found


class _Endpoint:
    """An ASGI endpoint: a handler, with every exception turned into the error object."""

    def __init__(self, handler: Handler, refusal: Refusal | None) -> None:
        self._handler, self._refusal = handler, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._handler(request)
        except BodyTooLarge as error:
            await refuse_body(request, self._answer(scope, error), send)
            return
        except Exception as error:
            response = self._answer(scope, error)
            if isinstance(error, Cancelled):
                response.headers["Connection"] = "close"
        await response(scope, receive, send)

    def _answer(self, scope: Scope, error: Exception) -> Response:
        exchange = scope.get(SCOPE_KEY)
        found = problem(error if exchange is None else name_as_sent(error, exchange.aliases))
        if exchange is not None:
            exchange.reason = found.reason
        return found.response(self._refusal)


def _route(path: str, handler: Handler, method: str, refusal: Refusal | None = None) -> Route:
    return Route(path, _Endpoint(handler, refusal), methods=[method])


def _write_answer(answer: Answer, context: RequestContext, body: Mapping[str, object]) -> Slices[Response]:
    """The response of an endpoint that generates no text; written in the same thread, off the event loop."""
    found = answer(context, body)
    if isinstance(found, Generator):
        found = yield from found
    return json_response(found)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    where = f"{request.method} {request.url.path[:200]}"
    texts = {
        404: f"{where}: there is no such path; {PATHS}",
        405: f"{where}: this path takes {(headers or {}).get('Allow', 'another method')}",
    }
    found, exchange = http_problem(status, texts.get(status, where), headers), request.scope.get(SCOPE_KEY)
    if exchange is not None:
        exchange.reason = found.reason
    return found.response(wire.refusal if request.url.path.startswith("/api/") else None)


async def _any_error(request: Request, error: Exception) -> Response:
    return problem(error).response()
