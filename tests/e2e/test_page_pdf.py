"""PDF files as attachments, read in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.browser import NOTE, answers, expect, needs_browser, opened, said, streamed
from tests.e2e.pdf_files import bomb, locked, pdf, scripted

pytestmark = needs_browser

READ = """async ([bytes, limits]) => {
    const { readPdf, LIMITS } = await import("/page/js/pdf.js");
    const file = new File([new Uint8Array(bytes)], "x.pdf");
    return readPdf(file, { ...LIMITS, ...limits }).catch((error) => `${error.name}: ${error.message}`);
}"""


def attached(page: Any, *contents: bytes, name: str = "paper.pdf") -> None:
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Attach text or PDF files").click()
    files = [{"name": name, "mimeType": "application/pdf", "buffer": content} for content in contents]
    waiting.value.set_files(files)
    expect(page.locator(".coming")).to_have_count(0)


def refused(page: Any, why: str) -> None:
    note = page.locator(NOTE).last
    expect(note).to_contain_text("was not attached: ")
    expect(note).to_contain_text(why)
    note.get_by_role("button", name="Close this notice").click()
    expect(page.locator("#attached")).to_be_hidden()


def test_the_text_of_a_pdf_goes_with_a_message_and_nothing_leaves_the_origin(page: Any, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sent = answers(opened(page, url), streamed({"content": "Read."}))
    assert not any("pdf.min" in one for one in asked)  # loaded when it is needed, not before
    attached(page, pdf(["Plaits", "have (three) strands: äöü"], ["```", "Second page"]))
    expect(page.locator("#attached li")).to_have_text(["paper.pdf"])
    said(page, "What is this?")
    text = "[Page 1]\nPlaits\nhave (three) strands: äöü\n\n[Page 2]\n```\nSecond page"
    assert sent[0]["messages"][0]["content"] == f"paper.pdf:\n````\n{text}\n````\n\nWhat is this?"
    assert {one.rpartition("/")[2] for one in asked if "/vendor/" in one} == {
        "pdf.min.mjs",
        "pdf.worker.min.mjs",
    }
    assert all(one.startswith((url, "blob:" + url)) for one in asked)


@pytest.mark.slow
def test_what_has_no_text_or_cannot_be_read_is_reported(page: Any, url: str) -> None:
    opened(page, url)
    attached(page, pdf(None, None))
    refused(page, "it has no text: its pages are pictures, as of a scanner")
    attached(page, locked())
    refused(page, "it is protected by a password")
    attached(page, b"%PDF-1.7\nnothing that follows is one")
    refused(page, "it is damaged, or no PDF")
    attached(page, pdf(*([["x"]] * 201)))
    refused(page, "it has 201 pages; at most 200 are read")
    huge = """async () => (await import("/page/js/pdf.js")).readPdf({ size: 20 * 2 ** 20 + 1 })
        .catch((error) => error.message)"""
    assert page.evaluate(huge) == "it has 20971521 bytes; at most 20971520 of a PDF are read"
    attached(page, pdf(["Words"], None, None), name="part.pdf")
    expect(page.locator(NOTE)).to_contain_text("part.pdf: 2 of 3 pages have no text")
    expect(page.locator("#attached li")).to_have_text(["part.pdf"])
    attached(page, pdf(["Told by its bytes"]), name="notes.txt")
    expect(page.locator("#attached li")).to_have_text(["part.pdf", "notes.txt"])


@pytest.mark.slow
def test_a_hostile_pdf_runs_nothing_and_ends_at_a_limit(page: Any, url: str) -> None:
    opened(page, url)
    found = page.evaluate(READ, [list(scripted()), {}])
    assert found["text"] == "Harmless to read"
    assert page.evaluate("window.hurt") is None
    assert "more text than" in page.evaluate(READ, [list(bomb(20_000_000)), {}])
    assert "was not read within 0.02 s" in page.evaluate(READ, [list(bomb(20_000_000)), {"ms": 20}])
    loops = pdf(["x"]).replace(b"/Kids [5 0 R]", b"/Kids [2 0 R]")
    assert "damaged" in page.evaluate(READ, [list(loops), {}])
    endless = pdf(["x"]).replace(b"/Count 1", b"/Count 2147483647")
    assert "pages" in page.evaluate(READ, [list(endless), {}])


@pytest.mark.slow
def test_a_message_waits_for_a_file_that_is_being_read(page: Any, url: str) -> None:
    sent = answers(opened(page, url), streamed({"content": "Read."}))
    page.route("**/pdf.min.mjs", lambda route: (page.wait_for_timeout(500), route.continue_()))
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Attach text or PDF files").click()
    waiting.value.set_files([{"name": "a.pdf", "mimeType": "application/pdf", "buffer": pdf(["Inside"])}])
    expect(page.locator(".coming")).to_have_text("Reading a.pdf…")
    page.fill("#draft", "Early")
    page.press("#draft", "Enter")
    expect(page.locator("#said")).to_have_text("A file is still being read")
    assert page.input_value("#draft") == "Early"
    expect(page.locator(".coming")).to_have_count(0)
    said(page, "Early")
    assert "Inside" in sent[0]["messages"][0]["content"]
