"""The page in a real browser: chats, completions, tokens, settings, the engine."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.frontend.frontend import Front
from tests.e2e.browser import HEIGHT, answers, expect, needs_browser, opened, said, streamed
from tests.e2e.conftest import Server
from tests.patience import PATIENCE_S
from tests.server.conftest import serving, start, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.real_engine import engine_front

pytestmark = needs_browser
HOSTILE = (
    '<img src=x onerror="window.hurt = 1"> <script>window.hurt = 1</script> '
    "[a](javascript:window.hurt=1) **b**"
)
TEXT = """# Title

Some **bold** and *soft* words, `code` and [a link](https://example.org/a).

- one
- two
  1. inner

```python
print("<b>")
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def test_a_message_gets_a_reply_with_its_numbers(page: Any, url: str) -> None:
    reply = said(opened(page, url), "SLOW Hello you")  # tokens that all come at once have no speed
    expect(reply.locator(".prose")).to_have_text("SLOW Hello you")
    expect(reply.locator(".facts")).to_contain_text("tok/s")
    expect(reply.locator(".facts")).to_contain_text("first")
    expect(page.locator("#said")).to_contain_text("Hello you")


def test_stop_ends_the_request(page: Any, url: str, front: Front) -> None:
    loop = front.loop
    assert isinstance(loop, EchoLoop)
    opened(page, url).fill("#draft", "SLOW " + "a long story " * 60)
    page.press("#draft", "Enter")
    expect(page.locator(".message.assistant .prose")).to_contain_text("SLOW")
    page.click("#stop")
    expect(page.locator(".facts").last).to_contain_text("stopped")
    assert wait_until(lambda: not any(loop.open.values()))
    expect(page.locator("#send")).to_be_visible()


def test_what_a_model_writes_is_never_markup(page: Any, url: str) -> None:
    reply = said(opened(page, url), HOSTILE)
    expect(reply.locator(".prose")).to_contain_text("<script>window.hurt = 1</script>")
    expect(reply.locator(".prose strong")).to_have_text("b")
    assert page.locator(".message img, .message script, .message a").count() == 0
    assert page.evaluate("window.hurt") is None


def test_markdown_becomes_what_it_says(page: Any, url: str) -> None:
    answers(opened(page, url), streamed(*({"content": TEXT[i : i + 7]} for i in range(0, len(TEXT), 7))))
    reply = said(page, "Markdown, please")
    assert reply.locator("h3").inner_text() == "Title"
    assert reply.locator("ul > li").count() == 2
    assert reply.locator("ul ol li").inner_text() == "inner"
    assert reply.locator("pre code").inner_text() == 'print("<b>")'
    assert reply.locator("td.end").inner_text() == "2"
    link = reply.locator("a")
    assert link.get_attribute("href") == "https://example.org/a"
    assert "noopener" in (link.get_attribute("rel") or "")


MATHS = r"""The sum $a^2 + b^2$ costs $5 and $6, and \(\frac{1}{2}\) is \$1.

$$
\int_0^1 x \, dx = \sqrt{\frac{1}{4}}
$$

\[ \sum_{i=1}^n i \]

```python
def f(x):  # a comment
    return "text" + str(12)
```

```unheard-of
<b>x</b>
```
"""


def test_code_has_colours_and_formulas_are_set(page: Any, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answers(opened(page, url), streamed(*({"content": MATHS[i : i + 5]} for i in range(0, len(MATHS), 5))))
    reply = said(page, "Formulas, please")
    expect(reply.locator(".formula .katex")).to_have_count(4)
    assert reply.locator(".formula.shown .katex-display").count() == 2
    expect(reply.locator("p").first).to_contain_text("costs $5 and $6, and")
    expect(reply.locator("p").first).to_contain_text("is $1.")
    assert reply.locator(".hl-keyword").all_inner_texts() == ["def", "return"]
    assert reply.locator(".hl-string").inner_text() == '"text"'
    assert reply.locator(".hl-comment").inner_text() == "# a comment"
    assert reply.locator("pre code").first.inner_text() == MATHS.split("python\n")[1].split("\n```")[0]
    assert reply.locator("pre code").last.inner_text() == "<b>x</b>"
    wanted = page.evaluate(
        "document.fonts.ready.then((fonts) => [...fonts].map((f) => [f.family, f.status]))"
    )
    assert ["KaTeX_Main", "loaded"] in wanted
    assert {one.split("/")[2] for one in asked} == {url.split("/")[2]}  # nothing leaves the origin


HOSTILE_MATHS = r"""$\href{javascript:window.hurt=1}{x}$ $\htmlData{a=b}{y}$ $\includegraphics{https://example.org/a.png}$
$\def\a{\a\a}\a$ $\rule{99999em}{99999em}$ $<img src=x onerror=window.hurt=1>$

$$\unknown{$$"""


def test_a_formula_can_neither_run_nor_load_nor_hang(page: Any, url: str) -> None:
    answers(opened(page, url), streamed({"content": HOSTILE_MATHS}))
    reply = said(page, "Hurt me")
    expect(reply.locator(".katex")).not_to_have_count(0)
    assert reply.locator("a, img, script").count() == 0
    assert page.evaluate("window.hurt") is None
    assert reply.bounding_box()["height"] < 3000


@pytest.mark.slow
def test_markdown_written_to_be_slow_is_drawn(page: Any, url: str) -> None:
    script = """async (text) => {
        const { Markdown } = await import("/page/js/markdown.js");
        const node = document.createElement("div");
        new Markdown(node).show(text);
        return node.childNodes.length;
    }"""
    opened(page, url)
    for piece in (
        "[",
        "**",
        "> ",
        "`a",
        "- ",
        "| a ",
        "_a ",
        "[](",
        "1. a\n  ",
        "**a _b",
        "https://",
        "$",
        "$$\n",
        "\\(",
    ):
        for text in (piece * 20000, piece * 5000 + "\n|-|", "x" + piece * 20000):
            assert page.evaluate(script, text) > 0, piece


def test_a_token_shows_what_else_it_could_have_been_and_the_reply_goes_on_from_it(
    page: Any, url: str
) -> None:
    opened(page, url).click("#panel-settings")
    page.check("input[name=probabilities]")
    reply = said(page, "abc")
    expect(reply.locator(".token")).to_have_count(3)
    reply.locator(".token").first.press("ArrowRight")
    page.keyboard.press("Enter")
    rows = page.locator(".alternatives .alt")
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("c")
    expect(rows.first).to_contain_text("90 %")
    rows.first.click()
    expect(page.locator(".message.live")).to_have_count(0)
    expect(page.locator(".message.assistant .token").nth(1)).to_have_text("c")
    assert page.locator(".message.assistant .token").count() > 2


def test_a_reply_is_written_again_and_a_question_edited(page: Any, url: str) -> None:
    said(opened(page, url), "First")
    said(page, "Second")
    page.locator(".message.user").first.hover()
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    page.fill(".editor", "Third")
    page.press(".editor", "Control+Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".message").last.locator(".prose")).to_have_text("Third")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message").last.locator(".facts")).to_contain_text("tok")
    expect(page.locator(".message")).to_have_count(2)


def test_conversations_are_kept_in_the_browser_until_they_are_deleted(page: Any, url: str) -> None:
    said(opened(page, url), "Remember me")
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    said(page, "Another")
    opened(page, url)
    expect(page.locator(".message.assistant .facts")).to_contain_text("7 tok")
    expect(page.locator(".entry")).to_have_text(["Another", "Remember me"])
    page.click("text=Remember me")
    expect(page.locator(".message.assistant .prose")).to_have_text("Remember me")
    page.locator("#conversations li").last.hover()
    page.get_by_role("button", name="Delete Remember me").click()
    expect(page.locator(".entry")).to_have_text(["Another"])
    expect(page.locator(".message")).to_have_count(0)


def test_settings_that_are_set_are_sent_and_no_others(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "Yes."}))
    said(page, "One")
    page.click("#panel-settings")
    page.fill("textarea[name=system]", "Be brief.")
    page.fill("input[name=temperature]", "0.3")
    page.fill("textarea[name=stop]", "A\nB")
    page.select_option("select[name=thinking]", "off")
    said(page, "Two")
    plain, full = sent
    assert set(plain) == {"messages", "stream", "stream_options"}
    assert full["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in full["messages"]] == ["system", "user", "assistant", "user"]
    assert (full["temperature"], full["stop"]) == (0.3, ["A", "B"])
    assert full["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_reasoning_is_folded_and_tool_calls_wait_for_their_results(page: Any, url: str) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city": "Rome"}'}}
    first = streamed(
        {"reasoning_content": "Look it "},
        {"reasoning_content": "up."},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
        finish="tool_calls",
    )
    sent = answers(opened(page, url), first, streamed({"content": "Sunny."}))
    reply = said(page, "The weather?")
    expect(reply.locator(".reasoning .prose")).to_be_hidden()
    reply.locator(".reasoning summary").click()
    expect(reply.locator(".reasoning .prose")).to_have_text("Look it up.")
    expect(reply.locator(".call summary")).to_have_text("weather")
    expect(reply.locator(".call pre")).to_contain_text('"city": "Rome"')
    reply.get_by_label("Result of weather").fill("25 degrees")
    reply.get_by_role("button", name="Send results").click()
    expect(page.locator(".message").last.locator(".prose")).to_have_text("Sunny.")
    *_, asked, result = sent[1]["messages"]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert asked["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "25 degrees"}


def test_a_refusal_says_why_and_can_be_tried_again(page: Any, url: str) -> None:
    reply = said(opened(page, url), "UNSAYABLE")
    expect(reply.locator(".failure")).to_contain_text("does not say UNSAYABLE")
    expect(reply.get_by_role("button", name="Try again")).to_be_visible()
    broken = said(page, "BOOM and more")
    expect(broken.locator(".failure")).to_contain_text("the engine failed here")
    expect(broken.locator(".prose")).to_have_text("BOO")


@pytest.mark.slow
def test_tools_that_are_no_json_are_not_sent(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "Yes."}))
    page.click("#panel-settings")
    page.fill("textarea[name=tools]", "[{")
    expect(said(page, "Hello").locator(".failure")).to_contain_text("not JSON")
    assert sent == []


@pytest.mark.slow
def test_what_another_version_stored_does_no_harm(page: Any, url: str) -> None:
    opened(page, url).evaluate("""() => {
        localStorage["plait.conversation.old"] = '{"id": "old", "title": "Old"}';
        localStorage["plait.conversation.cut"] = '{"id": "c';
        localStorage["plait.look"] = '{"conversation": "old", "panel": "none"}';
    }""")
    expect(said(opened(page, url), "Hello").locator(".prose")).to_have_text("Hello")
    expect(page.locator(".entry")).to_have_text(["Hello"])


def test_a_server_that_wants_a_key_is_given_one(page: Any) -> None:
    with serving(fake_front(), api_key=("not-for-everybody",)) as client:
        page.goto(client.base_url + "/")
        page.get_by_label("This server asks for an API key").fill("wrong")
        page.click("#key-save")
        expect(page.locator("#key-row")).to_contain_text("not one of this server's")
        page.get_by_label("This server asks for an API key").fill("not-for-everybody")
        page.click("#key-save")
        expect(page.locator("#key-row")).to_be_hidden()
        expect(said(page, "Hello").locator(".prose")).to_have_text("Hello")
        assert "not-for-everybody" not in page.evaluate("JSON.stringify(localStorage)")
        page.close()


@pytest.mark.slow
def test_a_model_without_a_chat_template_completes_text(page: Any) -> None:
    front = fake_front()
    front.chat_template = None
    with serving(front) as client:
        opened(page, client.base_url + "/")
        expect(page.get_by_role("radio", name="Complete")).to_be_checked()
        expect(page.get_by_role("radio", name="Chat")).to_be_disabled()
        said(page, "ab", "Control+Enter")
        expect(page.locator("#transcript .plain")).to_have_text(["ab", "ab"])
        said(page, "c", "Control+Enter")
        expect(page.locator("#transcript .plain").last).to_have_text("ababc")


def test_the_page_waits_for_the_model_and_then_goes_on_by_itself(page: Any) -> None:
    go = threading.Event()

    def load(report: Any) -> Front:
        report("reading weights", 3, 8)
        go.wait(PATIENCE_S)
        return fake_front()

    running = start(load, ServerConfig(port=0))
    try:
        page.goto(running.url + "/")
        expect(page.locator("#loading")).to_contain_text("reading weights")
        assert page.locator("#loading-bar").evaluate("bar => [bar.value, bar.max]") == [3, 8]
        expect(page.locator("#send")).to_be_disabled()
        go.set()
        expect(page.locator("#welcome")).to_be_visible()
        expect(page.locator("#send")).to_be_enabled()
    finally:
        go.set()
        page.close()
        running.stop()


def test_the_engine_is_seen_at_work(page: Any) -> None:
    with serving(engine_front(step_s=0.005)) as client:
        opened(page, client.base_url + "/").click("#panel-engine")
        page.click("#panel-settings")
        page.fill("input[name=max_tokens]", "600")
        page.click("#panel-engine")
        page.fill("#draft", "Hello")
        page.press("#draft", "Enter")
        expect(page.locator(".figure").first).to_contain_text("1")
        expect(page.locator(".plot-box").first.locator(".key.a strong")).not_to_have_text(
            re.compile("^(–|0.0)$")
        )
        expect(page.locator(".plot-box").nth(2).locator(".key.b strong")).to_contain_text("ms")
        expect(page.locator(".bar-box").first).to_contain_text(re.compile("held.*cached.*free"))
        page.click("#stop")
        page.close()  # no more scrapes of a server that ends


@pytest.mark.slow
def test_nothing_sticks_out_at_the_side(page: Any, url: str) -> None:
    answers(opened(page, url), streamed({"content": TEXT + "x" * 300}))
    said(page, "y" * 300)
    for panel in (None, "settings", "engine"):
        if panel:
            page.set_viewport_size({"width": 1440, "height": HEIGHT})
            page.click(f"#panel-{panel}")
        for width in (320, 768, 1440):
            page.set_viewport_size({"width": width, "height": HEIGHT})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#scroll").evaluate("all => all.scrollWidth - all.clientWidth") <= 0


def test_a_phone_reaches_conversations_settings_and_engine(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    said(opened(page, url), "Small")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator(".entry")).to_be_in_viewport()
    assert page.locator("#main").evaluate("main => main.inert")
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_role("button", name="Engine").click()
    expect(page.locator("#engine")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#panel-engine")).to_be_focused()


@pytest.mark.slow
def test_everything_that_can_be_used_has_a_name(page: Any, url: str) -> None:
    said(opened(page, url), "Named")
    page.click("#panel-settings")
    script = """() => [...document.querySelectorAll("button, input, textarea, [role=img], nav, aside")]
        .filter((node) => node.checkVisibility() && !node.labels?.length && !node.innerText?.trim()
            && !node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby"))
        .map((node) => node.outerHTML)"""
    assert page.evaluate(script) == []


def test_a_hybrid_of_mamba_and_mla_is_served_to_a_browser(page: Any, nano_server: Server) -> None:
    opened(page, nano_server.url + "/").get_by_text("Complete", exact=True).click()
    said(page, "And it came to pass", "Control+Enter")
    assert len(page.locator("#transcript .plain").last.inner_text()) > 20
    page.click("#panel-engine")
    expect(page.locator(".bar-box").nth(1)).to_contain_text("Slots and snapshots")
    expect(page.locator(".totals").last).to_contain_text("Replies ended by length")
    page.close()


@pytest.mark.slow
def test_a_conversation_may_have_settings_of_its_own(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "x"}))
    page.click("#panel-settings")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("For this conversation alone").check()
    page.get_by_label("Temperature").fill("1.5")
    said(page, "One")
    page.click("#new")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    said(page, "Two")
    page.reload()
    page.locator(".entry", has_text="One").click()
    expect(page.get_by_label("Temperature")).to_have_value("1.5")
    said(page, "Three")
    page.get_by_label("For this conversation alone").uncheck()
    said(page, "Four")
    assert [one["temperature"] for one in sent] == [1.5, 0.5, 1.5, 0.5]


@pytest.mark.slow
def test_system_prompts_are_kept_by_name(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "x"}))
    page.click("#panel-settings")
    for text in ("You are terse.\nVery.", "You rhyme."):
        page.get_by_label("System prompt").fill(text)
        page.get_by_role("button", name="Keep", exact=True).click()
    page.get_by_label("Kept prompts").select_option("You are terse.")
    expect(page.get_by_label("System prompt")).to_have_value("You are terse.\nVery.")
    said(page, "Hello")
    assert sent[0]["messages"][0] == {"role": "system", "content": "You are terse.\nVery."}
    page.get_by_role("button", name="Forget", exact=True).click()
    options = page.get_by_label("Kept prompts").locator("option")
    expect(options).to_have_text(["Kept prompts", "You rhyme."])
    page.get_by_role("button", name="Undo forgetting You are terse.").click()
    expect(options).to_have_count(3)


def test_keys_reach_what_they_say(page: Any, url: str) -> None:
    answers(opened(page, url), streamed({"content": "x"}))
    said(page, "One")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Control+.")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Control+Alt+n")
    expect(page.locator("#welcome")).to_be_visible()
    page.keyboard.press("Control+/")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()


def card(name: str, value: str = "loaded", **more: object) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 1,
        "status": {"value": value, **more},
        "max_model_len": 64,
    }


def test_of_several_models_one_is_chosen_for_a_conversation(page: Any, url: str) -> None:
    found = [card("small"), card("big", "unloaded")]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": found}))
    page.route("**/tokenize", lambda route: route.fulfill(json={"tokens": [1], "max_model_len": 64}))
    sent = answers(opened(page, url), streamed({"content": "x"}))
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(
        ["small", "big · not loaded yet"]
    )
    said(page, "One")
    found[1] = card("big", "loading", progress={"text": "reading", "done": 1, "total": 4})
    page.get_by_label("Model", exact=True).select_option("big")
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(
        ["small", "big · loading 25 %"]
    )
    found[1] = card("big")
    said(page, "Two")
    page.click("#new")
    said(page, "Three")
    page.get_by_label("Model", exact=True).select_option("small")
    said(page, "Four")
    page.locator(".entry", has_text="One").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("big")
    assert [one["model"] for one in sent] == ["small", "big", "big", "small"]
