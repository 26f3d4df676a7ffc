"""The page as people see it: at a desk and on a phone, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import browser
from tests.e2e.browser import LOOKS, answers, expect, needs_browser, opened, said, streamed

pytestmark = needs_browser

TEXT = """# Title

Some **bold** words, `code` and [a link](https://example.org/a).

> quoted

```python
print("a long line of code that is wider than a phone is, so that it must scroll by itself")
```

| a | b |
|---|--:|
| 1 | 2 |
"""
# Texts that are seen and have too little contrast to what is behind them (WCAG 2.2, 1.4.3).
FAINT = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
    const behind = (node) => {
        const below = node.parentElement ? behind(node.parentElement) : [255, 255, 255];
        return over(rgba(getComputedStyle(node).backgroundColor), below);
    };
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (color) => {
        const [r, g, b] = color.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const isSeen = (node) =>
        node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
        !node.closest(":disabled, .unseen, .skip, [inert], option, :has(> input:disabled)");
    const faint = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !isSeen(node)) continue;
        const below = behind(node);
        const both = [light(over(rgba(getComputedStyle(node).color), below)), light(below)];
        const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${text.data.trim().slice(0, 40)}`);
    }
    return faint;
}"""
# Names of controls that are smaller than a finger needs (WCAG 2.2, 2.5.8).
SMALL = """() =>
    [...document.querySelectorAll("button, textarea, select, input:not([type=radio], [type=checkbox])")]
        .filter((node) => node.checkVisibility() && !node.closest(".unseen"))
        .map((node) => [node.getAttribute("aria-label") ?? node.innerText, node.getBoundingClientRect()])
        .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""


@pytest.fixture(params=LOOKS)
def look(request: pytest.FixtureRequest, chromium: Any, url: str) -> Iterator[tuple[str, Any]]:
    """Name of a look, and the page in it with a conversation."""
    with browser.tab(chromium, **LOOKS[request.param]) as page:
        answers(opened(page, url), streamed({"reasoning_content": "Hm."}, {"content": TEXT}))
        said(page, "A question", "Control+Enter")
        yield request.param, page


def sound(page: Any) -> None:
    """Nothing is too faint to read, sticks out at the side or is too small to hit."""
    assert page.evaluate(FAINT) == []
    assert page.evaluate(SMALL) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_every_view_is_legible_fits_and_can_be_hit(look: tuple[str, Any]) -> None:
    name, page = look
    dark, phone = name.endswith("dark"), name.startswith("phone")
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 28)") is dark
    sound(page)
    for panel in ("Settings", "Engine"):
        page.locator(f"#panel-{panel.lower()}").click()
        expect(page.locator(f"#{panel.lower()}")).to_be_in_viewport()
        sound(page)
        page.get_by_role("button", name="Close the panel").click()
    page.get_by_role("button", name="Compare two replies").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport(ratio=1)
    sound(page)
    page.get_by_role("button", name="Close the comparison").click()
    if phone:
        expect(page.locator("#sidebar")).to_be_hidden()
        page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Keys").click()
    expect(page.locator("#keys")).to_be_in_viewport(ratio=1)
    sound(page)
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Export").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport(ratio=1)
    sound(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Move A question").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport(ratio=1)
    sound(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Operator").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport(ratio=1)
    sound(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Delete A question").click()
    expect(page.get_by_role("button", name="Undo deleting A question")).to_be_in_viewport(ratio=1)
    expect(page.locator("#welcome")).to_be_visible()
    sound(page)


@pytest.mark.sampled(4)
def test_faint_and_small_things_would_be_found(look: tuple[str, Any]) -> None:
    _, page = look
    page.evaluate("""() => {
        const soft = getComputedStyle(document.documentElement).getPropertyValue("--soft");
        const node = document.body.appendChild(document.createElement("button"));
        node.append("x");
        node.setAttribute("aria-label", "planted");
        node.style.cssText = `background: ${soft}; color: gray; width: 20px; height: 20px`;
    }""")
    assert [found.split()[1] for found in page.evaluate(FAINT)] == ["x"]
    assert page.evaluate(SMALL) == ["planted"]
