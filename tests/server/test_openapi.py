"""The document of the API describes every route, and the committed copy is the one this version makes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from plait.config import ServerConfig
from plait.server import pages
from plait.server.api.endpoint import Endpoint
from plait.server.app import ENDPOINTS, create_app
from plait.server.gateway.request_context import LoadingState
from tests.server.conftest import Client

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def test_the_committed_document_is_that_of_this_version() -> None:
    found = pages.document(ENDPOINTS)
    told = "docs/openapi.json is old: python tools/print_openapi.py > docs/openapi.json"
    assert msgspec.json.decode(COMMITTED.read_bytes()) == msgspec.json.decode(msgspec.json.encode(found)), (
        told
    )


def test_every_route_is_described() -> None:
    routes: list[Any] = list(create_app(LoadingState(), ServerConfig()).routes)
    paths = {re.sub(r":\w+}", "}", route.path) for route in routes}
    own = {path for path in paths if path == "/" or path.startswith("/page/")}
    told = pages.document(ENDPOINTS)["paths"]
    assert paths - own - {"/docs", "/openapi.json"} == set(told), "describe it in plait/server/pages.py"


def test_the_api_is_described_when_it_is_first_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    document = pages.document

    def describe(endpoints: Iterable[Endpoint]) -> dict[str, object]:
        made.append("document")
        return document(endpoints)

    monkeypatch.setattr(pages, "document", describe)
    routes: list[Any] = list(create_app(LoadingState(), ServerConfig()).routes)
    assert not made, "it would take a twelfth of a startup"
    assets = {route.path: route.endpoint for route in routes}
    found = read_asset(assets["/openapi.json"])
    assert msgspec.json.decode(found) == msgspec.json.decode(COMMITTED.read_bytes())
    assert read_asset(assets["/docs"]).startswith(b"<!doctype html>")
    assert read_asset(assets["/openapi.json"]) == found
    assert made == ["document"]


def read_asset(asset: pages.Asset) -> bytes:
    """The body of its answer."""
    parts: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    asyncio.run(asset({"type": "http", "method": "GET", "headers": []}, receive, send))
    return b"".join(parts)


def test_a_route_that_no_table_knows_is_described_by_its_fields() -> None:
    told = pages.document([Endpoint("/v1/new", frozenset({"b", "a"}))])["paths"]["/v1/new"]["post"]
    body = told["requestBody"]["content"]["application/json"]["schema"]
    assert list(body["properties"]) == ["a", "b"]


class Loaded(HTMLParser):
    """What a page would load or run, where its links go, and the places it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "img", "link", "iframe", "object"}:
            self.loads.append(tag)
        for key, value in attrs:
            if key == "href":
                self.links.append(value or "")
            if key == "id":
                self.ids.append(value or "")


def test_the_page_loads_nothing_and_its_links_lead_somewhere(client: Client) -> None:
    answer = client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == pages.DOCS_POLICY
    found = Loaded()
    found.feed(answer.body.decode())
    assert found.loads == []
    assert {link for link in found.links if link != "openapi.json"} <= {f"#{name}" for name in found.ids}
    assert len(found.ids) == len(set(found.ids))
    assert "https://" not in answer.body.decode()


def test_what_the_document_says_is_escaped() -> None:
    told = pages.document([Endpoint("/v1/<b>", frozenset({"<i>"}))])
    text = pages.write_page(told).decode()
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_a_browser_that_has_it_gets_304(client: Client, path: str) -> None:
    tag = client.get(path).headers["etag"]
    assert client.request("GET", path, headers={"If-None-Match": tag}).status == 304
