"""The pictures of the docs, of real models: `make screenshots` writes them, a test run only takes them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.contract.wire import Client
from tests.e2e import browser
from tests.e2e.browser import LOOKS, expect, needs_browser, opened, said
from tests.e2e.conftest import NANO_HYBRID, serve

pytestmark = [needs_browser, pytest.mark.slow]

ADMIN = "the-key-of-the-operator"
SETTINGS = """localStorage["plait.settings"] = '{"temperature": "0", "max_tokens": "160"}'"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(os.environ.get("PLAIT_SCREENSHOTS") or tmp_path)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[str]:
    options = ("--served-model-name", "SmolLM2-135M-Instruct", "--admin-key", ADMIN)
    with serve(smollm2, *options) as server:
        yield server.url + "/"


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Other clients, until the end of the block."""
    ended = threading.Event()

    def ask(n: int) -> None:
        client = Client(url.rstrip("/"))
        while not ended.is_set():
            with suppress(OSError):
                client.post("/v1/completions", {"prompt": f"Chapter {n}. The sea", "max_tokens": 40 + 30 * n})
            ended.wait(0.4 * n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def take(page: Any, folder: Path, name: str) -> None:
    expect(page.locator(".failure, .note.is-bad")).to_have_count(0)
    page.screenshot(path=folder / f"{name}.png", animations="disabled")
    assert (folder / f"{name}.png").stat().st_size > 10_000


def test_a_conversation_and_the_engine_at_work(chromium: Any, smol: str, folder: Path) -> None:
    with browser.tab(chromium, **LOOKS["desktop-light"]) as page, traffic(smol):
        page.goto(smol)
        page.evaluate(SETTINGS)
        opened(page, smol).click("#panel-engine")
        for text in ("Name three rivers of Europe.", "Write a haiku about a river."):
            said(page, text)
            page.click("#new")
        said(page, "Write a Python function that reverses a string, with an example.")
        page.wait_for_timeout(4000)  # so that the curves have a shape
        page.mouse.move(600, 600)
        take(page, folder, "chat")


def test_a_phone_in_the_dark(chromium: Any, smol: str, folder: Path) -> None:
    with browser.tab(chromium, **LOOKS["phone-dark"]) as page:
        page.goto(smol)
        page.evaluate(SETTINGS)
        said(opened(page, smol), "Give me three tips for a calm morning.", "Control+Enter")
        page.evaluate("document.activeElement.blur()")
        take(page, folder, "phone")


def test_a_deletion_that_can_be_undone(chromium: Any, smol: str, folder: Path) -> None:
    with browser.tab(chromium, **LOOKS["phone-light"]) as page:
        page.goto(smol)
        page.evaluate(SETTINGS.replace("160", "16"))
        opened(page, smol)
        for text in ("Why is the sky blue?", "Name three rivers of Europe.", "Write a haiku about a river."):
            said(page, text, "Control+Enter")
            page.get_by_role("button", name="Conversations").click()
            page.click("#new")
        page.get_by_role("button", name="Conversations").click()
        for text, folder_name in (("Name three rivers", "Rivers"), ("Write a haiku", "Rivers")):
            page.get_by_role("button", name=f"Move {text}").click()
            page.get_by_label("To a new folder").fill(folder_name)
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Close this notice").click()
        page.get_by_role("button", name="Delete Why is the sky blue?").click()
        take(page, folder, "conversations")


def test_two_replies_next_to_each_other(chromium: Any, smol: str, folder: Path) -> None:
    with browser.tab(chromium, **LOOKS["desktop-light"]) as page:
        page.goto(smol)
        page.evaluate(SETTINGS.replace("160", "120"))
        opened(page, smol).get_by_role("button", name="Compare two replies").click()
        page.get_by_label("Message to both").fill("Give me three tips for a calm morning.")
        right = page.get_by_role("region", name="Right", exact=True)
        right.get_by_label("Temperature").fill("0.8")
        right.get_by_label("Seed").fill("7")
        page.get_by_role("button", name="Run both").click()
        for name in ("left", "right"):
            keep = page.get_by_role("button", name=f"Keep the {name} reply")
            expect(keep).to_be_enabled(timeout=60_000)
        take(page, folder, "compare")


def test_requests_as_an_operator_sees_them(chromium: Any, smol: str, folder: Path) -> None:
    with browser.tab(chromium, **LOOKS["desktop-dark"]) as page, traffic(smol):
        opened(page, smol).get_by_role("button", name="Operator", exact=True).click()
        page.get_by_label("The server's admin key").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("table", name="Open requests")).to_contain_text("generating")
        page.get_by_role("tab", name="Log").click()
        expect(page.get_by_role("table").locator("tbody tr").nth(8)).to_be_visible(timeout=60_000)
        take(page, folder, "operator")


def test_what_else_a_token_could_have_been(chromium: Any, folder: Path) -> None:
    with serve(NANO_HYBRID) as server, browser.tab(chromium, **LOOKS["desktop-dark"]) as page:
        page.goto(server.url)
        page.evaluate(
            'localStorage["plait.settings"] = \'{"probabilities": true, "seed": "3", "max_tokens": "90"}\''
        )
        opened(page, server.url + "/").get_by_text("Complete", exact=True).click()
        page.click("#panel-engine")
        with traffic(server.url):
            said(page, "And it came to pass", "Control+Enter")
            page.wait_for_timeout(4000)
            page.locator("#transcript .token").nth(24).click()
            expect(page.locator(".alternatives .alt").first).to_be_visible()
            take(page, folder, "tokens")
        page.close()
