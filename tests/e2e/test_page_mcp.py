"""Tools of MCP servers on the page, in a real browser: shown, allowed or refused, and called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import expect, needs_browser, opened
from tests.server.conftest import serving
from tests.server.fake import fake_front
from tests.server.mcp.mcp_server import McpTestServer, serving_mcp
from tests.server.openai.speaking import SpeakingTemplate, said_call

pytestmark = needs_browser

HOSTILE = "<img src=x onerror='window.hurt = 1'>"
WEATHER = said_call("weather", '{"city": "Bonn"}')


@pytest.fixture(scope="module")
def mcp() -> Iterator[McpTestServer]:
    with serving_mcp() as server:
        yield server


@pytest.fixture(scope="module")
def tools_url(mcp: McpTestServer) -> Iterator[str]:
    servers = (f"demo={mcp.url('/json')}", f"broken={mcp.url('/html')}")
    with serving(fake_front(template=SpeakingTemplate()), mcp_server=servers) as client:
        yield client.base_url + "/"


@pytest.fixture
def ready(page: Any, tools_url: str, mcp: McpTestServer) -> Any:
    """The page with the tools of `demo` in use."""
    mcp.messages.clear()
    opened(page, tools_url)
    page.get_by_role("button", name="Tools of MCP servers").click()
    page.get_by_label("demo").check()
    expect(page.get_by_role("dialog").get_by_text("The weather somewhere.")).to_be_visible()
    page.get_by_role("button", name="Close").last.click()
    return page


def send(page: Any, text: str) -> None:
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def replies(page: Any) -> Any:
    return page.locator(".message.assistant")


def test_a_call_is_shown_and_made_when_it_is_allowed(ready: Any, mcp: McpTestServer) -> None:
    send(ready, WEATHER)
    consent = ready.get_by_role("group", name="Consent to weather")
    expect(consent).to_contain_text("Call weather of demo with these arguments?")
    expect(ready.locator(".call pre")).to_contain_text('"city": "Bonn"')
    assert mcp.calls() == []
    consent.get_by_role("button", name="Allow once").click()
    expect(ready.locator(".message.tool")).to_have_text("Tool resultRain in Bonn")
    expect(replies(ready)).to_have_count(2)
    expect(replies(ready).last).to_contain_text("Rain in Bonn")
    assert mcp.calls() == [{"name": "weather", "arguments": {"city": "Bonn"}}]
    send(ready, WEATHER)
    expect(ready.get_by_role("group", name="Consent to weather")).to_be_visible()
    assert len(mcp.calls()) == 1, "once is once"


@pytest.mark.slow
def test_a_refusal_calls_nothing_and_the_model_reads_it(ready: Any, mcp: McpTestServer) -> None:
    send(ready, WEATHER)
    ready.get_by_role("button", name="Refuse").click()
    expect(replies(ready).last).to_contain_text("The user refused this call.")
    assert mcp.calls() == []


@pytest.mark.slow
def test_always_is_for_one_tool_of_one_conversation(ready: Any, mcp: McpTestServer) -> None:
    inner = said_call("say", json.dumps({"text": WEATHER}))
    send(ready, inner)
    ready.get_by_role("button", name="Always in this conversation").click()
    expect(ready.get_by_role("group", name="Consent to weather")).to_be_visible()
    assert [call["name"] for call in mcp.calls()] == ["say"], "another tool asks"
    ready.get_by_role("button", name="Always in this conversation").click()
    expect(replies(ready).last).to_contain_text("Rain in Bonn")
    send(ready, inner)
    expect(replies(ready)).to_have_count(6)
    expect(replies(ready).last).to_contain_text("Rain in Bonn")
    assert [call["name"] for call in mcp.calls()] == ["say", "weather"] * 2, "rounds go on by themselves"
    ready.click("#new")
    send(ready, WEATHER)
    expect(replies(ready)).to_have_count(1)
    expect(ready.get_by_role("group", name="Consent to weather")).to_have_count(0)
    assert len(mcp.calls()) == 4, "a new conversation has no tools"


@pytest.mark.slow
def test_a_call_that_waits_is_not_made_by_loading_the_page_again(ready: Any, mcp: McpTestServer) -> None:
    send(ready, said_call("say", '{"text": "hi"}'))
    ready.get_by_role("button", name="Always in this conversation").click()
    expect(replies(ready).last).to_contain_text("hi")
    send(ready, WEATHER)
    expect(ready.get_by_role("group", name="Consent to weather")).to_be_visible()
    ready.reload()
    consent = ready.get_by_role("group", name="Consent to weather")
    expect(consent).to_be_visible()
    assert len(mcp.calls()) == 1
    consent.get_by_role("button", name="Allow once").click()
    expect(replies(ready).last).to_contain_text("Rain in Bonn")


@pytest.mark.slow
def test_words_of_a_server_are_text_and_its_failure_is_named(
    page: Any, tools_url: str, mcp: McpTestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"name": HOSTILE, "description": HOSTILE, "inputSchema": {"type": "object"}}
    monkeypatch.setattr(mcp, "tools", [entry])
    opened(page, tools_url)
    page.get_by_role("button", name="Tools of MCP servers").click()
    page.get_by_label("demo").check()
    expect(page.get_by_role("dialog").get_by_text(HOSTILE).first).to_be_visible()
    page.get_by_label("broken").check()
    expect(page.get_by_role("alert").filter(has_text="HTTP 200: its content is 'text/html'")).to_be_visible()
    page.get_by_role("button", name="Close").last.click()
    send(page, "Hello")
    expect(replies(page)).to_contain_text("HTTP 200")
    assert page.evaluate("window.hurt") is None


def test_the_button_is_there_only_with_servers(page: Any, url: str) -> None:
    opened(page, url)
    expect(page.locator("#mcp-open")).to_be_hidden()
