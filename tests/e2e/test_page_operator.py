"""The operator's view in a real browser, over a server of several models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.wire import Client
from tests.e2e import browser
from tests.e2e.browser import LOOKS, expect, needs_browser
from tests.server.conftest import serving
from tests.server.fake import fake_front
from tests.server.models import test_served
from tests.server.models.pooling import Bench

pytestmark = [needs_browser, pytest.mark.slow]
ADMIN, SECRET = "s3cret-of-the-operator", "s3cret-of-alice"


@pytest.fixture(scope="module")
def several() -> Iterator[Client]:
    bench = Bench("small", "big", "bad", fit=4, admin_key=ADMIN, api_key=(f"alice:{SECRET} rpm=500 open=9",))
    bench.loader.broken["bad"] = ValueError("its weights <b>are</b> cut")
    with test_served.serving(bench) as client:
        yield Client(client.base_url, "small", {"Authorization": f"Bearer {SECRET}"})


def entered(page: Any, url: str, key: str = ADMIN) -> Any:
    """The view, with this key."""
    page.goto(url)
    page.get_by_role("button", name="Operator", exact=True).click()
    page.get_by_label("The server's admin key").fill(key)
    page.get_by_role("button", name="Use key").last.click()
    return page.get_by_role("dialog", name="Operator")


def row(dialog: Any, table: str, text: str) -> Any:
    return dialog.get_by_role("table", name=table).locator("tr", has_text=text)


def test_only_the_admin_key_opens_it_and_it_stays_for_the_tab(page: Any, several: Client) -> None:
    dialog = entered(page, several.base_url + "/", "wrong")
    expect(dialog.get_by_role("alert")).to_contain_text("needs the server's admin key")
    expect(page.get_by_label("The server's admin key")).to_be_focused()
    expect(dialog.get_by_role("table")).to_have_count(0)
    page.get_by_label("The server's admin key").fill(ADMIN)
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("tabpanel")).to_contain_text("No request is open.")
    expect(page.locator("#operator-said")).to_be_empty()
    assert page.evaluate("JSON.stringify(localStorage)").count(ADMIN) == 0
    page.reload()
    page.keyboard.press("Control+Alt+o")
    expect(dialog.get_by_role("tabpanel")).to_contain_text("No request is open.")
    page.keyboard.press("Escape")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if "/admin/" in request.url else None)
    page.wait_for_timeout(2500)
    assert sent == []  # no request while it is closed


def test_a_server_without_an_admin_key_says_so(page: Any) -> None:
    with serving(fake_front()) as client:
        dialog = entered(page, client.base_url + "/")
        expect(dialog.get_by_role("alert")).to_contain_text("--admin-key sets none here")
        page.goto("about:blank")


def test_models_are_loaded_and_unloaded_by_hand(page: Any, several: Client) -> None:
    dialog = entered(page, several.base_url + "/")
    dialog.get_by_role("tab", name="Models").click()
    expect(row(dialog, "Models", "big")).to_contain_text("unloaded")
    dialog.get_by_role("button", name="Load big").click()
    expect(dialog.get_by_role("button", name="Unload big")).to_be_focused()
    expect(row(dialog, "Models", "big")).to_contain_text("loaded")
    dialog.get_by_role("button", name="Unload big").click()
    expect(row(dialog, "Models", "big")).to_contain_text("unloaded")
    dialog.get_by_role("button", name="Load bad").click()
    expect(row(dialog, "Models", "bad")).to_contain_text("failed: ")
    expect(row(dialog, "Models", "bad")).to_contain_text("its weights <b>are</b> cut")


def test_requests_keys_and_the_log_show_what_clients_do(page: Any, several: Client) -> None:
    dialog = entered(page, several.base_url + "/")
    hang = {"max_tokens": 400, "messages": [{"role": "user", "content": "SLOW " + "private " * 60}]}
    body = {"model": "small", **hang}
    headers = {"x-request-id": "req-seen"}
    thread = threading.Thread(target=lambda: several.post("/v1/chat/completions", body, **headers))
    thread.start()
    expect(row(dialog, "Open requests", "req-seen")).to_contain_text("generating")
    expect(row(dialog, "Open requests", "req-seen")).to_contain_text("alice")
    dialog.get_by_role("tab", name="Requests").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(dialog.get_by_role("tab", name="Limits")).to_be_focused()
    expect(row(dialog, "Limits", "Body of a request")).to_contain_text("8 MiB")
    dialog.get_by_role("tab", name="Keys").click()
    expect(row(dialog, "Keys", "alice")).to_contain_text("of 500")
    dialog.get_by_role("tab", name="Requests").click()
    dialog.get_by_role("button", name="req-seen").click()
    thread.join()
    expect(row(dialog, "Ended requests", "req-seen")).to_contain_text("200")
    dialog.get_by_label("Request id").fill("none-of-this-name")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("tabpanel")).to_contain_text("None of the last")
    shown = page.content()
    assert "private" not in shown
    assert SECRET not in shown


@pytest.mark.parametrize("look", ["phone-light", "phone-dark"])
def test_it_fits_a_phone(chromium: Any, several: Client, look: str) -> None:
    with browser.tab(chromium, **LOOKS[look]) as page:
        page.goto(several.base_url + "/")
        page.get_by_role("button", name="Conversations").tap()
        page.get_by_role("button", name="Operator", exact=True).tap()
        page.get_by_label("The server's admin key").fill(ADMIN)
        page.get_by_role("button", name="Use key").last.tap()
        dialog = page.get_by_role("dialog", name="Operator")
        dialog.get_by_role("tab", name="Log").tap()
        expect(dialog.get_by_role("table")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        box = dialog.bounding_box()
        assert box["width"] <= 360
