"""Folders of conversations in a real browser: made, renamed, filled by menu, key and mouse, in files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e import browser
from tests.e2e.browser import (
    LOOKS,
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


def begun(page: Any, url: str, *titles: str) -> None:
    """Conversations with these titles, the last one open."""
    answers(opened(page, url), streamed({"content": "Salt comes from stones."}))
    for title in titles:
        page.evaluate("document.querySelector('#new').click()")
        said(page, title, "Control+Enter")


def made(page: Any, name: str) -> None:
    page.get_by_role("button", name="New folder").click()
    page.get_by_label("Name of the new folder").fill(name)
    page.keyboard.press("Enter")


def inside(page: Any, name: str) -> Any:
    return page.get_by_role("list", name=f"Folder {name}").locator(".entry")


def moved(page: Any, title: str, target: str) -> None:
    page.locator("#conversations .entry", has_text=title).focus()
    page.keyboard.press("m")
    page.get_by_role("dialog", name=f"Move “{title}”").get_by_role("button", name=target, exact=True).click()


def folders_of(page: Any) -> dict[str, str]:
    """Folder by title, as the browser keeps them."""
    script = """() => Object.fromEntries(Object.entries(localStorage)
        .filter(([key]) => key.startsWith("plait.folder.")).map(([, text]) => JSON.parse(text))
        .map((one) => [one.id, one.name]))"""
    names = page.evaluate(script)
    return {one["title"]: names.get(one.get("folder"), "") for one in kept(page)}


def test_a_conversation_is_moved_by_menu_and_back_by_undo(page: Any, url: str) -> None:
    begun(page, url, "Sea", "Sky")
    made(page, "Nature")
    expect(page.get_by_role("button", name="Nature 0")).to_be_focused()
    page.locator("#conversations li").filter(has_text="Sea").hover()
    page.get_by_role("button", name="Move Sea").click()
    dialog = page.get_by_role("dialog", name="Move “Sea”")
    expect(dialog.get_by_role("button", name="In no folder")).to_have_attribute("aria-current", "true")
    dialog.get_by_role("button", name="Nature").click()
    expect(inside(page, "Nature")).to_have_text(["Sea"])
    assert folders_of(page) == {"Sky": "", "Sea": "Nature"}
    page.get_by_role("button", name="Undo moving Sea").click()
    expect(inside(page, "Nature")).to_have_count(0)
    assert folders_of(page) == {"Sky": "", "Sea": ""}
    page.reload()
    page.locator("#conversations .entry", has_text="Sky").focus()
    changes = "dispatchEvent(new StorageEvent('storage', {key: null}))"  # another tab's draw the list anew
    assert page.evaluate(f"{changes}, document.activeElement.textContent") == "Sky"
    moved(page, "Sky", "Nature")  # the open one
    expect(inside(page, "Nature")).to_have_text(["Sky"])
    said(page, "More")  # which the open conversation's own copy must know, too
    assert folders_of(page) == {"Sky": "Nature", "Sea": ""}


@pytest.mark.slow
def test_a_folder_is_made_in_the_menu_and_names_are_unique(page: Any, url: str) -> None:
    begun(page, url, "Sea")
    page.locator("#conversations .entry").focus()
    page.keyboard.press("m")
    page.get_by_label("To a new folder").fill("  Nature\tand more ")
    page.keyboard.press("Enter")
    expect(inside(page, "Nature and more")).to_have_text(["Sea"])
    made(page, "NATURE and more")  # is the same one
    made(page, "Work")
    expect(page.locator(".folder-text")).to_have_text(["Nature and more", "Work"])
    page.get_by_role("button", name="Work 0").press("F2")
    page.get_by_label("Name of the folder Work").fill("nature AND more")
    page.keyboard.press("Enter")
    expect(page.locator(NOTE).last).to_contain_text("another one is called")
    page.get_by_role("button", name="Work 0").press("F2")
    page.get_by_label("Name of the folder Work").fill("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Home 0")).to_be_focused()
    page.get_by_role("button", name="Home 0").press("F2")
    page.keyboard.type("x")
    page.keyboard.press("Escape")
    expect(page.locator(".folder-text")).to_have_text(["Home", "Nature and more"])


@pytest.mark.slow
def test_what_is_in_a_deleted_folder_moves_out_and_back_with_undo(page: Any, url: str) -> None:
    begun(page, url, "Sea", "Sky", "Ice")
    made(page, "Nature")
    for title in ("Sea", "Ice"):
        moved(page, title, "Nature")
    page.get_by_role("button", name="Nature 2").press("Delete")
    expect(page.locator(".folder")).to_have_count(0)
    expect(entries(page)).to_have_text(["Ice", "Sky", "Sea"])
    page.locator("#conversations .entry", has_text="Sea").press("Delete")
    expect(entries(page)).to_have_count(2)
    page.get_by_role("button", name="Undo deleting the folder Nature").click()
    expect(inside(page, "Nature")).to_have_text(["Ice"])
    page.keyboard.press("Control+z")  # the conversation comes back into its place outside
    assert folders_of(page) == {"Ice": "Nature", "Sky": "", "Sea": ""}


@pytest.mark.slow
def test_folders_fold_and_begin_conversations(page: Any, url: str) -> None:
    begun(page, url, "Sea")
    made(page, "Nature")
    moved(page, "Sea", "Nature")
    head = page.get_by_role("button", name="Nature 1")
    head.click()
    expect(head).to_have_attribute("aria-expanded", "false")
    expect(entries(page)).to_be_hidden()
    page.reload()
    expect(entries(page)).to_be_hidden()
    page.get_by_role("searchbox").fill("stones")  # found across folders, and shown
    expect(inside(page, "Nature")).to_be_visible()
    page.get_by_role("searchbox").fill("nature SALT")  # the folder's name counts
    expect(inside(page, "Nature")).to_have_text(["Sea"])
    page.get_by_role("searchbox").fill("granite")
    expect(page.locator(".folder")).to_have_count(0)
    page.get_by_role("searchbox").fill("")
    head.click()
    head.hover()
    page.get_by_role("button", name="New conversation in Nature").click()
    said(page, "Rain")
    expect(inside(page, "Nature")).to_have_text(["Rain", "Sea"])


@pytest.mark.slow
def test_rows_are_dragged_into_and_out_of_folders(page: Any, url: str) -> None:
    begun(page, url, "Sea", "Sky")
    made(page, "Nature")
    page.locator("#conversations li", has_text="Sky").last.drag_to(page.locator(".folder-name"))
    expect(inside(page, "Nature")).to_have_text(["Sky"])
    expect(page.locator(".is-over")).to_have_count(0)
    inside(page, "Nature").drag_to(page.locator("#conversations > li").last)
    expect(inside(page, "Nature")).to_have_count(0)
    assert folders_of(page) == {"Sky": "", "Sea": ""}


@pytest.mark.slow
def test_folders_go_into_files_and_come_back_by_name(page: Any, url: str) -> None:
    begun(page, url, "Sea", "Sky")
    made(page, "Nature")
    moved(page, "Sky", "Nature")
    for form in ("JSON", "Markdown"):
        name, content = exported(page, "The folder “Nature”", form)
        assert name.startswith("plait-nature-")
        assert b"Sea" not in content
        content = exported(page, "All conversations", form)[1]
        page.evaluate("localStorage.clear()")
        opened(page, url)
        expect(imported(page, content)).to_contain_text("Imported 2 conversations")
        assert folders_of(page) == {"Sea": "", "Sky": "Nature"}
        inside(page, "Nature").click()
    theirs = {"mode": "chat", "title": "T", "updated": 1, "messages": [{"role": "user", "content": "x"}]}
    file = {"format": "plait.conversations", "version": 1}
    more = [{**theirs, "folder": f" nature{'' if i == 0 else i}\n"} for i in range(201)]
    bad = json.dumps({**file, "conversations": more}).encode()
    expect(imported(page, bad)).to_contain_text("at most 200 are kept")
    assert len(kept(page)) == 2
    expect(page.locator(".folder")).to_have_count(1)  # those that were made for it are gone, too
    one = json.dumps({**file, "conversations": more[:1]}).encode()
    expect(imported(page, one)).to_contain_text("Imported 1 conversation")
    expect(inside(page, "Nature")).to_have_count(2)
    wrong = json.dumps({**file, "conversations": [{**theirs, "folder": {"a": 1}}]}).encode()
    expect(imported(page, wrong)).to_contain_text('"folder" is not a text')


@pytest.mark.slow
def test_a_phone_moves_by_menu(chromium: Any, url: str) -> None:
    with browser.tab(chromium, **LOOKS["phone-dark"]) as page:
        begun(page, url, "Sea")
        page.get_by_role("button", name="Conversations").tap()
        page.get_by_role("button", name="Move Sea").tap()
        page.get_by_label("To a new folder").fill("Nature")
        page.get_by_role("dialog").get_by_role("button", name="Move", exact=True).tap()
        expect(inside(page, "Nature")).to_have_text(["Sea"])
        page.get_by_role("button", name="Delete folder Nature").tap()
        expect(entries(page)).to_have_text(["Sea"])
        expect(page.locator(".folder")).to_have_count(0)
