"""The docs site: every page is in its navigation, and the reference names modules that are there."""

from __future__ import annotations

import re
from pathlib import Path

import plait

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def test_navigation_has_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(re.findall(r"[\w./-]+\.md\b", navigation)) == sorted(pages)


def test_reference_names_modules_and_classes_that_are_there() -> None:
    named = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert named
    assert [name for name in named if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Whether `plait.a.b` is a module, or `plait.a.B` a class or function of one."""
    path, (module, _, last) = ROOT / name.replace(".", "/"), name.rpartition(".")
    source = ROOT / (module.replace(".", "/") + ".py")
    return path.with_suffix(".py").is_file() or (
        source.is_file()
        and re.search(rf"^(class|def) {last}\b", source.read_text("utf-8"), re.MULTILINE) is not None
    )


def test_changelog_begins_with_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == plait.__version__


def test_links_of_the_pages_outside_docs_lead_to_files() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in ROOT.glob("*.md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8"))
        if page.name != "CHANGELOG.md" and not (ROOT / target).exists()
    ]
    assert broken == []
