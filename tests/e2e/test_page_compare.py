"""Two replies side by side in a real browser, and the keys that the page has."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e import browser
from tests.e2e.browser import (
    LOOKS,
    NOTE,
    answers,
    expect,
    exported,
    imported,
    kept,
    needs_browser,
    opened,
    said,
    streamed,
)

pytestmark = needs_browser


def side(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def run(page: Any, text: str) -> None:
    page.get_by_label("Message to both").fill(text)
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("button", name="Run both")).to_be_visible()
    expect(page.locator("#compare .message.live")).to_have_count(0)


def test_two_settings_reply_at_once_and_one_reply_is_kept(page: Any, url: str) -> None:
    said(opened(page, url), "Before")
    page.fill("#draft", "SLOW " + "words " * 30)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda r: sent.append(json.loads(r.post_data)) if "chat/comp" in r.url else None)
    page.get_by_role("button", name="Compare two replies").click()
    side(page, "Left").get_by_label("Temperature").fill("0")
    side(page, "Right").get_by_label("Temperature").fill("1.5")
    side(page, "Right").get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Run both").click()
    for name in ("Left reply", "Right reply"):  # both stream, neither has ended
        expect(side(page, name).locator(".prose")).to_contain_text("SLOW")
    assert page.locator("#compare .message.live").count() == 2
    expect(page.get_by_role("button", name="Keep the right reply")).to_be_enabled()
    page.get_by_role("button", name="Keep the right reply").click()
    expect(page.locator("#compare")).to_be_hidden()
    assert [one.get("temperature") for one in sent] == [0, 1.5]
    assert [one["messages"][0]["role"] for one in sent] == ["user", "system"]
    assert all([m["content"] for m in one["messages"]][-3:-1] == ["Before", "Before"] for one in sent)
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(".message").last.get_by_role("status")).to_have_text("2 of 2")
    expect(page.locator("#draft")).to_have_value("")
    expect(page.locator(NOTE)).to_contain_text("Kept the right reply; the conversation goes on")
    (found,) = kept(page)
    assert found["settings"] == {"temperature": "1.5", "system": "Be brief."}
    assert len(found["messages"][3]["versions"]) == 1
    sent.clear()
    said(page, "After")
    assert sent[0]["temperature"] == 1.5


CARDS = [{"id": name, "max_model_len": 100, "status": {"value": "loaded"}} for name in ("small", "big")]


@pytest.mark.slow
def test_two_models_are_compared_and_the_reply_names_its_model(page: Any, url: str) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": CARDS}))

    def answer(route: Any) -> None:
        model = json.loads(route.request.post_data)["model"]
        route.fulfill(content_type="text/event-stream", body=streamed({"content": f"I am {model}."}))

    opened(page, url)
    page.route("**/v1/chat/completions", answer)
    page.keyboard.press("Control+Alt+c")
    assert [side(page, n).get_by_label("Model").input_value() for n in ("Left", "Right")] == ["small", "big"]
    run(page, "Who?")
    expect(side(page, "Left reply").locator(".prose")).to_have_text("I am small.")
    expect(side(page, "Right reply").locator(".facts")).to_contain_text("big")
    page.get_by_role("button", name="Keep the right reply").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("I am big.")
    expect(page.locator("#models")).to_have_value("big")
    page.get_by_role("button", name="Version before").click()
    expect(page.locator(".message.assistant .facts")).to_contain_text("small")
    name, content = exported(page, "This conversation", "JSON")
    page.evaluate("localStorage.clear()")
    opened(page, url)
    imported(page, content, name=name)
    assert [kept(page)[0]["messages"][1][key] for key in ("model", "content")] == ["small", "I am small."]


@pytest.mark.slow
def test_a_comparison_is_stopped_left_and_survives_the_failure_of_a_side(page: Any, url: str) -> None:
    opened(page, url).fill("#draft", "SLOW " + "words " * 60)
    page.keyboard.press("Control+Alt+c")
    page.keyboard.press("Control+Enter")
    expect(side(page, "Left reply").locator(".prose")).to_contain_text("SLOW")
    page.keyboard.press("Escape")  # stops
    expect(side(page, "Left reply").locator(".facts")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Run both")).to_be_focused()
    page.keyboard.press("Escape")  # closes, and the text is where it was
    expect(page.locator("#draft")).to_have_value(re.compile("^SLOW words"))
    assert kept(page) == []
    page.fill("#draft", "")
    page.keyboard.press("Control+Alt+c")
    page.get_by_role("button", name="Run both").click()  # without a message
    expect(page.get_by_label("Message to both")).to_be_focused()
    side(page, "Left").get_by_label("Temperature").fill("9")
    page.keyboard.press("Control+Enter")  # the field refuses
    assert side(page, "Left").get_by_label("Temperature").get_attribute("aria-invalid") == "true"
    expect(page.locator("#compare .message")).to_have_count(2)  # those before
    side(page, "Left").get_by_label("Temperature").fill("0.5")
    failure = {"error": {"message": "temperature: not today", "code": None}}
    page.route(
        "**/v1/chat/completions",
        lambda route: (
            route.fulfill(status=400, json=failure) if "0.5" in route.request.post_data else route.fallback()
        ),
    )
    run(page, "Hello")
    expect(side(page, "Left reply").get_by_role("alert")).to_contain_text("not today")
    expect(page.get_by_role("button", name="Keep the left reply")).to_be_disabled()
    page.get_by_role("button", name="Keep the right reply").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("Hello")
    expect(page.get_by_role("button", name="Version before")).to_have_count(0)


@pytest.mark.slow
@pytest.mark.parametrize("look", ["phone-light", "phone-dark"])
def test_on_a_phone_the_sides_are_one_below_the_other(chromium: Any, url: str, look: str) -> None:
    with browser.tab(chromium, **LOOKS[look]) as page:
        opened(page, url).get_by_role("button", name="Compare two replies").tap()
        page.get_by_label("Message to both").fill("Short")
        page.get_by_role("button", name="Run both").tap()
        left, right = (side(page, name).bounding_box() for name in ("Left", "Right"))
        assert left["y"] + left["height"] <= right["y"]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.get_by_role("button", name="Keep the left reply").tap()
        expect(page.locator(".message.assistant .prose")).to_have_text("Short")


def shown_keys(page: Any) -> dict[str, str]:
    rows = page.locator("#keys-list dt").all_inner_texts()
    return dict(zip(rows, page.locator("#keys-list dd").all_inner_texts(), strict=True))


@pytest.mark.slow
def test_every_key_that_works_anywhere_is_shown_and_does_what_it_says(page: Any, url: str) -> None:
    answers(opened(page, url), streamed({"content": "one"}), streamed({"content": "two"}))
    said(page, "Question")
    page.locator("#scroll").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    keys = shown_keys(page)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    seen = {
        "Ctrl /": lambda: expect(dialog).to_be_visible(),
        "Ctrl K": lambda: expect(page.locator("#search")).to_be_focused(),
        "Ctrl .": lambda: expect(page.locator("#settings")).to_be_visible(),
        "Ctrl Alt E": lambda: expect(page.locator("#engine")).to_be_visible(),
        "Ctrl B": lambda: expect(page.locator("#sidebar")).to_be_hidden(),
        "Ctrl Alt C": lambda: expect(page.locator("#compare")).to_be_visible(),
        "Ctrl Alt R": lambda: expect(page.locator(".message.assistant .prose")).to_have_text("two"),
        "Ctrl Alt N": lambda: expect(page.locator("#welcome")).to_be_visible(),
    }
    for combination, expected in seen.items():
        assert keys.pop(combination)
        page.keyboard.press(combination.replace("Ctrl", "Control").replace(" ", "+").replace("N", "n"))
        expected()
        page.keyboard.press("Escape")
        if combination == "Ctrl B":
            page.keyboard.press("Control+b")
    page.fill("#draft", "why")
    page.keyboard.press("End")
    page.keyboard.type("?")  # a question mark where one writes
    expect(page.locator("#draft")).to_have_value("why?")
    expect(dialog).to_be_hidden()
    page.dispatch_event(
        "#draft", "keydown", {"key": "n", "ctrlKey": True, "altKey": True, "modifierAltGraph": True}
    )
    expect(page.locator("#draft")).to_have_value("why?")
    assert {"?", "Ctrl Z", "Esc", "F2", "Delete", "M", "Enter", "Shift Enter"} <= set(keys)
