"""Conversations in a real browser: deleting with undo, files out, files in."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.browser import (
    HEIGHT,
    NOTE,
    answers,
    entries,
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

HOSTILE = '<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>[a](javascript:window.hurt=1)'
TRICKY = "<!-- plait:user -->\n## You\n\\<!-- plait:call -->\n\n```\ncode\n```\n\n"


def delete(page: Any, title: str) -> None:
    page.locator("#conversations li").filter(has_text=title).hover()
    page.get_by_role("button", name=f"Delete {title}", exact=True).click()


def file_of(*messages: object, **more: object) -> bytes:
    conversation = {"mode": "chat", "title": "Theirs", "updated": 1, "messages": messages, **more}
    file = {"format": "plait.conversations", "version": 1, "conversations": [conversation]}
    return json.dumps(file).encode()


def test_a_deleted_conversation_comes_back_with_undo(page: Any, url: str) -> None:
    said(opened(page, url), "First")
    page.click("#new")
    said(page, "Second")
    before = kept(page)
    delete(page, "First")
    expect(entries(page)).to_have_text(["Second"])
    assert len(kept(page)) == 1
    page.get_by_role("button", name="Undo deleting First").click()
    expect(entries(page)).to_have_text(["Second", "First"])
    expect(entries(page).last).to_be_focused()
    expect(page.locator(NOTE)).to_have_count(0)
    assert kept(page) == before


@pytest.mark.slow
def test_the_open_conversation_comes_back_open_and_by_keyboard(page: Any, url: str) -> None:
    said(opened(page, url), "Mine")
    entries(page).focus()
    page.keyboard.press("Delete")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.get_by_role("button", name="Undo deleting Mine")).to_be_focused()
    expect(page.locator("#said")).to_have_text(re.compile("Deleted “Mine”. Undo is possible for 10 seconds"))
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .prose")).to_have_text("Mine")
    expect(entries(page)).to_be_focused()
    page.keyboard.press("Delete")
    page.keyboard.press("Control+z")
    expect(page.locator(".message.assistant .prose")).to_have_text("Mine")


@pytest.mark.slow
def test_undo_is_there_for_ten_seconds_and_gives_the_focus_back(page: Any, url: str) -> None:
    page.clock.install()
    said(opened(page, url), "Gone")
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    delete(page, "Gone")
    undo = page.get_by_role("button", name="Undo deleting Gone")
    page.clock.run_for(9900)
    expect(undo).to_be_focused()
    page.clock.run_for(200)
    expect(undo).to_have_count(0)
    expect(page.locator("#new")).to_be_focused()
    page.keyboard.press("Control+z")
    assert kept(page) == []


@pytest.mark.slow
def test_two_deletions_are_undone_each_by_itself(page: Any, url: str) -> None:
    for text in ("One", "Two"):
        page.goto("about:blank")
        opened(page, url).click("#new")
        said(page, text)
    delete(page, "One")
    delete(page, "Two")
    page.get_by_role("button", name="Undo deleting One").click()
    expect(entries(page)).to_have_text(["One"])
    page.keyboard.press("Control+z")
    expect(entries(page)).to_have_text(["Two", "One"])


@pytest.mark.slow
def test_a_reply_that_ends_after_its_deletion_stays_deleted(page: Any, url: str) -> None:
    opened(page, url).fill("#draft", "SLOW " + "words " * 60)
    page.press("#draft", "Enter")
    expect(page.locator(".message.assistant .prose")).to_contain_text("SLOW")
    page.keyboard.press("Escape")
    delete(page, page.locator(".entry").inner_text())
    expect(page.locator("#send")).to_be_visible()
    expect(entries(page)).to_have_count(0)
    assert kept(page) == []


@pytest.mark.parametrize("form", ["Markdown", "JSON"])
def test_what_is_exported_can_be_imported_elsewhere(page: Any, url: str, form: str) -> None:
    call = {"index": 0, "id": "c>1", "type": "function", "function": {"name": "f", "arguments": '{"a":\n1}'}}
    answers(
        opened(page, url),
        streamed({"reasoning_content": "Hm.\n"}, {"content": TRICKY}, {"tool_calls": [call]}),
        streamed({"content": HOSTILE}),
    )
    said(page, "Look it up\nnow")
    page.get_by_label("Result of f").fill("25 degrees")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".message").last.locator(".prose")).to_contain_text("onerror")
    page.get_by_text("Complete", exact=True).click()
    said(page, "Once ", "Control+Enter")
    before = kept(page)
    name, content = exported(page, "All conversations", form)
    assert re.fullmatch(r"plait-conversations-\d{4}-\d\d-\d\d\.(md|json)", name)
    page.evaluate("localStorage.clear()")
    opened(page, url)
    expect(imported(page, content, name=name)).to_contain_text("Imported 2 conversations")
    expect(entries(page)).to_have_text(["Once", "Look it up"])
    if form == "JSON":
        assert kept(page) == before
    for one, other in zip(kept(page), before, strict=True):
        assert (one["id"], one["mode"], one["updated"]) == (other["id"], other["mode"], other["updated"])
        for mine, theirs in zip(one["messages"], other["messages"], strict=True):
            for field in ("role", "content", "reasoning", "tool_calls", "tool_call_id", "answered"):
                assert mine.get(field) == theirs.get(field)
    page.click("text=Look it up")
    expect(page.locator(".message")).to_have_count(4)
    assert page.locator(".message img, .message script, .message a").count() == 0
    assert page.evaluate("window.hurt") is None
    expect(imported(page, content)).to_contain_text("Imported 0 conversations, 2 were here already")
    expect(entries(page)).to_have_count(2)


@pytest.mark.slow
def test_one_conversation_is_exported_under_its_title_as_text_to_read(page: Any, url: str) -> None:
    said(opened(page, url), "What is a *plait*?")
    name, content = exported(page, "This conversation", "Markdown")
    assert re.fullmatch(r"plait-what-is-a-plait-\d{4}-\d\d-\d\d\.md", name)
    shown = re.sub(r"<!--.*?-->\n", "", content.decode())
    assert (
        shown == "# What is a *plait*?\n\n## You\n\nWhat is a *plait*?\n\n## Reply\n\nWhat is a *plait*?\n\n"
    )


@pytest.mark.slow
def test_a_conversation_that_went_on_elsewhere_is_imported_next_to_the_one_here(page: Any, url: str) -> None:
    said(opened(page, url), "Start")
    content = exported(page, "All conversations", "JSON")[1]
    said(page, "And on")
    expect(imported(page, content)).to_contain_text("Imported 1 conversation")
    assert sorted(len(one["messages"]) for one in kept(page)) == [2, 4]
    assert len({one["id"] for one in kept(page)}) == 2


USER = {"role": "user", "content": "Hi"}
BAD = {
    "nothing": (b"", "holds no conversation"),
    "not-text": (b"\xff\xfe\x00", "not text in UTF-8"),
    "cut": (file_of(USER)[:-9], "begins like JSON, and is not"),
    "other-json": (b'{"conversations": []}', '"format" is not "plait.conversations"'),
    "other-version": (file_of(USER).replace(b'"version": 1', b'"version": 2'), '"version" is not 1'),
    "other-markdown": (b"# Notes\n\nBuy milk.", "line 1: this is not Markdown that Plait exported"),
    "role": (file_of(USER, {"role": "system", "content": ""}), 'conversation 1, message 2: "role"'),
    "content": (file_of({"role": "user", "content": {"a": 1}}), '"content" is not a text'),
    "mode": (file_of(mode="html"), '"mode" is neither'),
    "calls": (file_of({"role": "assistant", "content": "", "tool_calls": [1]}), "tool call is not an object"),
    "marker": (b'<!-- plait:conversation {"version":1,"mode":"chat"} -->\n# T\n\n<!-- plait:', "line 4"),
}


def test_a_file_that_is_not_ours_is_refused_whole_with_the_reason(page: Any, url: str) -> None:
    opened(page, url)
    for content, why in BAD.values():
        note = imported(page, content, name="theirs.json")
        expect(note).to_have_role("alert")
        expect(note).to_contain_text("theirs.json was not imported")
        expect(note).to_contain_text(why)
        note.get_by_role("button", name="Close this notice").click()
        expect(page.locator(NOTE)).to_have_count(0)
    assert kept(page) == []


@pytest.mark.slow
def test_a_file_larger_than_a_browser_keeps_is_not_read(page: Any, url: str) -> None:
    script = """async () => {
        const { readFile } = await import("/page/js/transfer.js");
        const file = { size: 2 ** 25 + 1, arrayBuffer: () => { throw new Error("read"); } };
        return readFile(file).catch((error) => error.message);
    }"""
    assert "at most 33554432 are read" in opened(page, url).evaluate(script)


@pytest.mark.slow
def test_only_known_fields_of_a_file_are_kept_and_its_text_is_never_markup(page: Any, url: str) -> None:
    reply = {"role": "assistant", "content": HOSTILE, "html": "x", "stats": {"rate": "fast", "tokens": 3}}
    theirs = file_of(USER, reply, title=f"{HOSTILE}\x00\n2", id="../x", updated=1e300, isGone=True)
    theirs = theirs.replace(b'"html": "x"', b'"__proto__": {"content": "polluted"}')
    expect(imported(opened(page, url), theirs)).to_contain_text("Imported 1 conversation")
    entries(page).click()
    expect(page.locator(".message.assistant .prose")).to_contain_text("onerror")
    assert page.locator("#conversations img, .message img, .message a").count() == 0
    assert page.evaluate("[window.hurt, ({}).content]") == [None, None]
    (found,) = kept(page)
    assert re.fullmatch("[0-9a-f]{16}", found["id"])
    assert found["title"] == f"{HOSTILE} 2"
    assert found["updated"] <= page.evaluate("Date.now()")
    empty = {"reasoning": "", "tool_calls": []}
    assert found["messages"] == [
        USER,
        {"role": "assistant", "content": HOSTILE, **empty, "stats": {"tokens": 3}},
    ]
    assert set(found) == {"id", "title", "mode", "updated", "messages"}


@pytest.mark.slow
def test_a_browser_without_space_imports_nothing_of_a_file(page: Any, url: str) -> None:
    opened(page, url).evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 3000))")
    many = json.loads(file_of(USER))
    many["conversations"] = [{**many["conversations"][0], "title": f"{i} {'y' * 100}"} for i in range(40)]
    note = imported(page, json.dumps(many).encode(), name="many.json")
    expect(note).to_contain_text("many.json was not imported: this browser has no room for it")
    assert kept(page) == []


@pytest.mark.slow
def test_the_dialog_is_used_by_keyboard_and_closes_with_escape(page: Any, url: str) -> None:
    opened(page, url)
    expect(page.get_by_role("button", name="Export")).to_be_disabled()
    said(page, "Word")
    page.get_by_role("button", name="Export").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Export conversations")
    expect(dialog.get_by_role("radio", name="This conversation")).to_be_focused()
    expect(dialog.get_by_role("group", name="Which")).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Export")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename.endswith(".json")
    expect(page.locator("#said")).to_have_text(re.compile("Exported 1 conversation"))


def test_versions_of_a_reply_are_kept_with_what_came_after(page: Any, url: str) -> None:
    answers(opened(page, url), *(streamed({"content": text}) for text in ("first", "more", "second")))
    said(page, "Question")
    said(page, "Go on")
    page.get_by_role("button", name="Regenerate").first.click()
    reply = page.locator(".message.assistant")
    expect(reply).to_have_count(1)
    expect(reply.locator(".prose")).to_have_text("second")
    expect(reply.get_by_role("status")).to_have_text("2 of 2")
    page.get_by_role("button", name="Version before").click()
    expect(page.locator(".message .body")).to_have_text(["Question", "first", "Go on", "more"])
    page.reload()
    expect(page.locator(".message .body")).to_have_text(["Question", "first", "Go on", "more"])
    name, content = exported(page, "This conversation", "JSON")
    delete(page, "Question")
    imported(page, content, name=name)
    entries(page).first.click()
    page.get_by_role("button", name="Version after").click()
    expect(page.locator(".message .body")).to_have_text(["Question", "second"])
    expect(page.get_by_role("button", name="Version after")).to_be_disabled()


LATE_FRAMES = """
const held = [], fetched = window.fetch;
window.requestAnimationFrame = (draw) => held.push(draw);
window.fetch = (...given) => { held.splice(0).forEach((draw) => draw()); return fetched(...given); };
"""


def test_a_reply_that_ended_is_not_drawn_as_live_while_the_next_one_runs(page: Any, url: str) -> None:
    """A frame may come late: automatic calls of tools go on in the very moment that a reply ends."""
    answers(opened(page, url), *(streamed({"content": text}) for text in ("first", "more")))
    page.evaluate(LATE_FRAMES)
    said(page, "Question")
    said(page, "Go on")
    expect(page.locator(".message .body")).to_have_text(["Question", "first", "Go on", "more"])


@pytest.mark.slow
def test_an_edited_question_keeps_what_it_was(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "one"}), streamed({"content": "two"}))
    said(page, "Question")
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Better question")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".message .body")).to_have_text(["Better question", "two"])
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Version before").click()
    expect(page.locator(".message .body")).to_have_text(["Question", "one"])
    assert [one["messages"][0]["content"] for one in sent] == ["Question", "Better question"]
    assert set(sent[1]["messages"][0]) == {"role", "content"}  # versions stay in the browser


def test_conversations_are_renamed_and_found(page: Any, url: str) -> None:
    answers(opened(page, url), streamed({"content": "Salt comes from stones."}), streamed({"content": "x"}))
    said(page, "Why is the sea salt?")
    page.click("#new")
    said(page, "Another")
    page.locator("#conversations li").filter(has_text="sea").hover()
    page.get_by_role("button", name="Rename Why is the sea salt?").click()
    page.get_by_label("Name of the conversation").fill(f"Seas {HOSTILE}")
    page.keyboard.press("Enter")
    expect(entries(page)).to_have_text(["Another", f"Seas {HOSTILE}"])
    entries(page).first.focus()
    page.keyboard.press("F2")
    page.keyboard.type("not kept")
    page.keyboard.press("Escape")
    expect(entries(page).first).to_have_text("Another")
    page.get_by_label("Search conversations").fill("STONES salt")
    expect(entries(page)).to_have_text([f"Seas {HOSTILE}"])
    page.get_by_label("Search conversations").fill("granite")
    expect(entries(page)).to_have_count(0)
    assert page.evaluate("window.hurt") is None


def test_files_go_with_a_message_as_text(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "Read."}))
    files = [
        {"name": "a.py", "mimeType": "text/x-python", "buffer": b"x = '''```'''\r\n"},
        {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"},
        {"name": "c.txt", "mimeType": "text/plain", "buffer": b"x" * (512 * 1024 + 1)},
        {"name": "d.csv", "mimeType": "text/csv", "buffer": b"1,2\n"},
    ]
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Attach text or PDF files").click()
    waiting.value.set_files(files)
    expect(page.locator(NOTE)).to_have_count(2)
    expect(page.locator("#attached li")).to_have_text(["a.py", "d.csv"])
    page.get_by_role("button", name="Remove d.csv").click()
    said(page, "What is this?")
    assert sent[0]["messages"][0]["content"] == "a.py:\n````py\nx = '''```'''\n````\n\nWhat is this?"
    expect(page.locator("#attached")).to_be_hidden()


def test_light_or_dark_can_be_chosen(page: Any, url: str) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    opened(page, url).click("#panel-settings")
    page.get_by_label("Light or dark").select_option("dark")
    assert page.evaluate(background) == "rgb(21, 23, 28)"
    opened(page, url)
    assert page.evaluate(background) == "rgb(21, 23, 28)"
    page.get_by_label("Light or dark").select_option("light")
    assert page.evaluate(background) == "rgb(250, 249, 246)"


@pytest.mark.slow
def test_versions_of_another_kind_or_too_deep_are_refused(page: Any, url: str) -> None:
    opened(page, url)
    deep: dict[str, Any] = {"role": "user", "content": "x"}
    for _ in range(60):
        deep = {
            "role": "user",
            "content": "x",
            "versions": [{"role": "user", "content": "y", "after": [deep]}],
        }
    expect(imported(page, file_of(deep))).to_contain_text("more than 50 deep")
    other = {"role": "user", "content": "x", "versions": [{"role": "tool", "content": "y", "after": []}]}
    expect(imported(page, file_of(other))).to_contain_text("a version is of another kind")
    assert kept(page) == []


def test_two_tabs_with_one_conversation_lose_nothing(chromium: Any, url: str) -> None:
    context = chromium.new_context(viewport={"width": 1200, "height": HEIGHT})
    one, other = context.new_page(), context.new_page()
    said(opened(one, url), "First")
    expect(opened(other, url).locator(".message")).to_have_count(2)
    said(one, "Second of one")
    expect(other.locator(".message")).to_have_count(4)
    expect(other.locator(".message.assistant .prose").last).to_have_text("Second of one")
    said(other, "Third of the other")
    expect(one.locator(".message.assistant .prose").last).to_have_text("Third of the other")
    # A change of its title alone, while a reply is being written here, is no other conversation.
    one.fill("#draft", "SLOW " + "fourth of one " * 30)
    one.press("#draft", "Enter")
    expect(one.locator(".message.live")).to_have_count(1)
    entries(other).first.focus()
    other.keyboard.press("F2")
    other.get_by_label("Name of the conversation").fill("Renamed")
    other.keyboard.press("Enter")
    expect(entries(one)).to_have_text(["Renamed"])
    # Both write at once: both are kept.
    said(other, "Fifth of the other")
    expect(one.locator(NOTE)).to_contain_text("Another tab went on with this conversation")
    expect(one.locator(".message.live")).to_have_count(0)
    expect(entries(one)).to_have_count(2)
    found = [" ".join(message["content"] for message in each["messages"]) for each in kept(one)]
    assert all("Third of the other" in text for text in found)
    assert sorted(("fourth of one" in text, "Fifth of the other" in text) for text in found) in (
        [(False, True), (True, False)],
        [(True, False), (True, True)],  # the other tab had the question when it wrote
    )
    context.close()


def test_a_conversation_that_another_tab_deletes_stays_deleted(chromium: Any, url: str) -> None:
    """What one tab writes to it meanwhile is kept nowhere, until deleting is undone."""
    context = chromium.new_context(viewport={"width": 1200, "height": HEIGHT})
    one, other = context.new_page(), context.new_page()
    said(opened(one, url), "First")
    expect(opened(other, url).locator(".message")).to_have_count(2)
    one.fill("#draft", "SLOW " + "second of one " * 30)
    one.press("#draft", "Enter")
    expect(one.locator(".message.live")).to_have_count(1)
    delete(other, "First")
    expect(one.locator(NOTE)).to_contain_text("Another tab deleted this conversation")
    expect(one.locator(".message")).to_have_count(0)
    said(one, "Another talk")
    expect(entries(one)).to_have_text(["Another talk"])
    expect(entries(other)).to_have_text(["Another talk"])
    assert [each["title"] for each in kept(one)] == ["Another talk"]
    other.get_by_role("button", name="Undo deleting First").click()
    expect(entries(one)).to_have_count(2)
    entries(one).filter(has_text="First").click()
    said(one, "It goes on")
    assert sorted(each["title"] for each in kept(one)) == ["Another talk", "First"]
    context.close()


def test_a_tab_that_has_not_heard_of_a_deletion_does_not_undo_it(page: Any, url: str) -> None:
    said(opened(page, url), "First")
    text = json.dumps(kept(page)[0])
    delete(page, "First")
    write = "async (text) => (await import('./page/js/store.js')).save(JSON.parse(text))"
    page.evaluate(write, text)
    assert kept(page) == []
    # A file that has it brings it back.
    imported(page, file_of(*json.loads(text)["messages"], id=json.loads(text)["id"], title="First"))
    expect(entries(page)).to_have_text(["First"])
    # A mark goes when no tab can be left that has not heard of it.
    page.evaluate("localStorage.setItem('plait.gone.old', String(Date.now() - 31 * 24 * 3600 * 1000))")
    delete(page, "First")
    marks = page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('plait.gone.'))")
    assert marks == [f"plait.gone.{json.loads(text)['id']}"]
