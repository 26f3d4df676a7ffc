"""Accessibility of the page: axe finds nothing serious in any view, in any look."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import browser
from tests.e2e.browser import LOOKS, answers, expect, needs_browser, opened, said, streamed
from tests.e2e.pdf_files import pdf
from tests.server.conftest import serving
from tests.server.fake import fake_front

pytestmark = needs_browser

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8")
RUN = """async () => {
    const values = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
    const options = { runOnly: { type: "tag", values }, resultTypes: ["violations"] };
    const { violations } = await axe.run(document, options);
    return violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html.slice(0, 160)}`));
}"""
ADMIN = "s3cret-of-the-operator"
TEXT = """# Title

Some **bold** words, `code`, $a^2$ and [a link](https://example.org/a).

> quoted

```python
def f(x):  # a comment that is longer than a phone is wide, so that it must scroll by itself, for long
    return "text", 1.5
```

$$
\\int_0^1 x \\, dx
$$

| a | b |
|---|--:|
| 1 | 2 |
"""
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOKENS = {
    "content": [
        {
            "token": token,
            "logprob": p,
            "top_logprobs": [{"token": token, "logprob": p}, {"token": "x", "logprob": -3}],
        }
        for token, p in (("Sure", -0.1), (" thing", -2.5))
    ]
}


def violations(page: Any) -> list[str]:
    """What axe finds now: rule, place, and what to do."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(RUN)
    return found


def with_tokens() -> str:
    text = streamed({"content": "Sure thing"})
    frames = text.split("\n\n")
    first = json.loads(frames[0].removeprefix("data: "))
    first["choices"][0]["logprobs"] = TOKENS
    return "\n\n".join([f"data: {json.dumps(first)}", *frames[1:]])


def seen_conversation(page: Any) -> None:
    answers(
        page,
        streamed({"reasoning_content": "Hm."}, {"content": TEXT}),
        with_tokens(),
        streamed({"content": "Look"}, {"tool_calls": [CALL]}),
    )
    said(page, "A question", "Control+Enter")
    expect(page.locator(".katex").first).to_be_visible()
    said(page, "With tokens", "Control+Enter")
    said(page, "With a call", "Control+Enter")


def attach(page: Any) -> None:
    file = {"name": "paper.pdf", "mimeType": "application/pdf", "buffer": pdf(["Words"], None)}
    page.set_input_files("#attach-files", [file])
    expect(page.locator("#attached li")).to_have_text(["paper.pdf"])


def sidebar(page: Any, is_phone: bool) -> None:
    if is_phone and page.locator("#sidebar").is_hidden():
        page.get_by_role("button", name="Conversations").click()


class Walk:
    """Goes from view to view and keeps what axe says of each."""

    def __init__(self, page: Any, look: str) -> None:
        self.page, self.is_phone, self.found = page, look.startswith("phone"), dict[str, list[str]]()

    def check(self, name: str, act: Callable[[], object] = lambda: None) -> None:
        act()
        self.page.wait_for_timeout(250)  # transitions of colours
        if found := violations(self.page):
            self.found[name] = found

    def list(self) -> None:
        page = self.page
        sidebar(page, self.is_phone)
        page.get_by_role("button", name="New folder").click()
        self.check("name of a folder")
        page.get_by_label("Name of the new folder").fill("Nature")
        page.keyboard.press("Enter")
        page.locator("#conversations .entry").focus()
        page.keyboard.press("m")
        self.check("move")
        page.get_by_role("dialog").get_by_role("button", name="Nature").click()
        self.check("folder and notice")
        page.locator("#conversations .entry").press("F2")
        self.check("rename")
        page.keyboard.press("Escape")
        for opener, name in (("Export", "export"), ("Keys", "keys")):
            sidebar(page, self.is_phone)
            page.get_by_role("button", name=opener, exact=True).click()
            self.check(name)
            page.keyboard.press("Escape")

    def panels(self) -> None:
        for panel in ("settings", "engine"):
            self.page.locator(f"#panel-{panel}").click()
            self.check(panel)
            self.page.get_by_role("button", name="Close the panel").click()

    def operator(self) -> None:
        page = self.page
        sidebar(page, self.is_phone)
        page.get_by_role("button", name="Operator", exact=True).click()
        self.check("admin key")
        page.get_by_label("The server's admin key").fill(ADMIN)
        page.get_by_role("button", name="Use key").last.click()
        for name in ("Requests", "Models", "Keys", "Limits", "Log"):
            page.get_by_role("tab", name=name).click()
            expect(page.locator("#operator-view h3").first).to_be_visible()
            self.check(f"operator: {name}")
        page.keyboard.press("Escape")

    def compare(self) -> None:
        page = self.page
        page.get_by_role("button", name="Compare two replies").click()
        self.check("compare")
        page.get_by_label("Message to both").fill("Which?")
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_role("button", name="Keep the left reply")).to_be_enabled()
        self.check("compared")
        page.keyboard.press("Escape")


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious_in_any_view(chromium: Any, look: str) -> None:
    with serving(fake_front(), admin_key=ADMIN) as client, browser.tab(chromium, **LOOKS[look]) as page:
        walk = Walk(opened(page, client.base_url + "/"), look)
        walk.check("welcome")
        walk.check("conversation", lambda: seen_conversation(page))
        walk.check("token", lambda: page.locator("#transcript .token").first.click())
        page.keyboard.press("Escape")
        if walk.is_phone:
            page.locator(".message.user").first.scroll_into_view_if_needed()
        page.locator(".message.user").first.hover()
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        walk.check("edit")
        page.get_by_role("button", name="Cancel").first.click()
        walk.check("attached", lambda: attach(page))
        walk.panels()
        walk.list()
        if walk.is_phone:
            page.keyboard.press("Escape")
        walk.compare()
        walk.operator()
        assert "\n".join(f"{view}: {one}" for view, all in walk.found.items() for one in all) == ""


@pytest.mark.slow
@pytest.mark.parametrize("look", ["desktop-light", "phone-dark"])
def test_axe_finds_nothing_serious_where_a_key_is_needed_or_the_server_is_away(
    chromium: Any, look: str
) -> None:
    with browser.tab(chromium, **LOOKS[look]) as page:
        with serving(fake_front(), api_key=("needed",)) as client:
            page.goto(client.base_url + "/")
            expect(page.locator("#key")).to_be_visible()
            assert violations(page) == []
        expect(page.locator("#loading")).to_be_visible()
        assert violations(page) == []
        page.goto("about:blank")


def test_axe_finds_nothing_serious_in_a_new_conversation_and_would_find_what_is_wrong(
    page: Any, url: str
) -> None:
    assert violations(opened(page, url)) == []
    page.evaluate("""() => {
        const node = document.querySelector("#welcome").appendChild(document.createElement("button"));
        node.style.cssText = "width: 30px; height: 30px";
    }""")
    assert [found.split(":")[0] for found in violations(page)] == ["button-name"]
