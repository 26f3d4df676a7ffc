"""The page in a real browser: Chromium as Playwright drives it, and what tests of the page share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

__all__ = [
    "HEIGHT",
    "LOOKS",
    "NOTE",
    "QuietDriver",
    "answers",
    "entries",
    "expect",
    "exported",
    "imported",
    "kept",
    "launched_once",
    "needs_browser",
    "opened",
    "said",
    "streamed",
    "tab",
]

HEIGHT = 720
NOTE = ".note"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 720},
    "device_scale_factor": 1.5,
    "has_touch": True,
    "is_mobile": True,
}
LOOKS = {
    f"{name}-{scheme}": {**device, "color_scheme": scheme}
    for name, device in (("desktop", DESKTOP), ("phone", PHONE))
    for scheme in ("light", "dark")
}
PATIENCE_MS = 60_000  # on a machine that does other things, too
# The shell opens no window, so a tab costs it a third of the time.
NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable", "chrome"),
)
FLAGS = (
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
)


def browser_path() -> str | None:
    """The Chromium or Chrome of this machine: CHROME_BIN, or one on the path."""
    named = os.environ.get("CHROME_BIN")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    browser_path() is None,
    reason="no Chromium: `apt-get install chromium-headless-shell`, or CHROME_BIN=/path/to/chrome",
)

expect.set_options(timeout=PATIENCE_MS)


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Chromium without a window. Its sandbox refuses to run as root, so it goes without one there."""
    sandbox = () if os.geteuid() else ("--no-sandbox",)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path(), args=[*FLAGS, *sandbox], headless=True, timeout=60_000
        )
        yield browser
        browser.close()


class QuietDriver:
    """One Chromium for the tests of a process, with the event loop of its driver out of the others' way.

    While Playwright runs, its loop counts as running in this thread, and `asyncio.run` refuses. Between two
    modules that use the browser nothing calls it, so its loop need not run.
    """

    def __init__(self, chromium: Any) -> None:
        self.chromium, self._loop = chromium, asyncio.get_running_loop()
        self.rest()

    def rest(self) -> None:
        asyncio._set_running_loop(None)

    def wake(self) -> None:
        asyncio._set_running_loop(self._loop)


@contextlib.contextmanager
def launched_once() -> Iterator[QuietDriver]:
    with launched() as chromium:
        driver = QuietDriver(chromium)
        try:
            yield driver
        finally:
            driver.wake()  # to be closed


@contextlib.contextmanager
def tab(browser: Any, **look: Any) -> Iterator[Any]:
    """A fresh tab. An error of its scripts, or a refusal by its policy, fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": HEIGHT}, **look})
    context.set_default_timeout(PATIENCE_MS)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if "Security Policy" in m.text else None)
    yield page
    context.close()
    assert errors == []


def opened(page: Any, url: str) -> Any:
    page.goto(url)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#version")).not_to_be_empty()
    return page


def said(page: Any, text: str, key: str = "Enter", patience_ms: int = 60_000) -> Any:
    """Send a text and wait for the end of the reply; returns the newest message."""
    page.fill("#draft", text)
    page.press("#draft", key)
    expect(page.locator("#stop")).to_be_hidden(timeout=patience_ms)
    expect(page.locator(".message.live")).to_have_count(0)
    return page.locator(".message").last


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """A stream of chat chunks, as the wire has it."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    frames = [json.dumps({"choices": [choice]}) for choice in choices]
    return "".join(f"data: {frame}\n\n" for frame in [*frames, "[DONE]"])


def answers(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Have chats answered by these streams, in turn; returns the list of what was sent."""
    sent: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        body = bodies[min(len(sent), len(bodies)) - 1]
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    return sent


def entries(page: Any) -> Any:
    return page.locator(".entry")


def exported(page: Any, which: str, form: str) -> tuple[str, bytes]:
    """Name and content of the file that the dialog saves."""
    page.get_by_role("button", name="Export").click()
    page.get_by_role("dialog").get_by_label(which).check()
    page.get_by_role("dialog").get_by_label(form).check()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def imported(page: Any, *contents: bytes, name: str = "file") -> Any:
    """Choose files as a user does; returns the newest notice."""
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Import").click()
    files = [{"name": name, "mimeType": "text/plain", "buffer": content} for content in contents]
    waiting.value.set_files(files)
    return page.locator(NOTE).last


def kept(page: Any) -> list[dict[str, Any]]:
    """What the browser stores, latest first."""
    script = """() => Object.entries(localStorage).filter(([key]) => key.startsWith("plait.conversation."))
        .map(([, text]) => JSON.parse(text)).sort((a, b) => b.updated - a.updated)"""
    found: list[dict[str, Any]] = page.evaluate(script)
    return found
