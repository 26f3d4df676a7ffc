"""The docs site: every page is in its navigation, and the reference names modules that are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

import plait
from plait.cli.main import cli
from plait.text.output.format_table import FORMATS
from plait.text.output.reasoning import REASONING

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def test_navigation_has_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(re.findall(r"[\w./-]+\.md\b", navigation)) == sorted(pages)


def test_reference_names_modules_and_classes_that_are_there() -> None:
    named = list_referenced()
    assert named
    assert [name for name in named if not is_there(name)] == []


def test_reference_has_every_module_that_the_worked_examples_import() -> None:
    imported = {
        name
        for page in DOCS.glob("add-a-*.md")
        for name in re.findall(r"^from (plait\.\S+) import", page.read_text("utf-8"), re.MULTILINE)
    }
    made = {name for name in imported if name.endswith(".l2_norm")}  # by the pages themselves
    assert made
    assert imported - made - set(list_referenced()) == set()


def list_referenced() -> list[str]:
    return [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    ]


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


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end with."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    titles = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_all_pages_lead_to_files_and_headings() -> None:
    """mkdocs sees those of docs/ alone."""
    pages = [
        *ROOT.glob("*.md"),
        *(p for name in ("docs", "examples", "benchmarks") for p in (ROOT / name).rglob("*.md")),
    ]
    links = [
        (page, page.parent / target if target else page, anchor)
        for page in pages
        for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8"))
    ]
    assert len(links) > 200
    broken = [
        f"{page.name}: {target.name}#{anchor}"
        for page, target, anchor in links
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]
    assert broken == []


def test_the_worked_family_is_the_code_s() -> None:
    """Each line of the example is a line of the module that it is taken from, comments aside."""
    page = (DOCS / "add-a-family.md").read_text("utf-8")
    source = {line.strip() for line in (ROOT / "plait/families/hybrid.py").read_text("utf-8").splitlines()}
    shown = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
        for line in block.splitlines()
    ]
    renamed = {"names = {": "names: Rules = {"}
    assert len(shown) > 15
    assert [line for line in shown if line and renamed.get(line, line) not in source] == []


def test_curl_sends_json_as_json() -> None:
    """What curl sends with -d alone is a form, which paths of OpenAI refuse."""
    calls = [
        line
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("curl ") and " -d " in line
    ]
    assert [line for line in calls if "application/json" not in line] == []


def test_commands_of_the_pages_are_there_with_their_options() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *DOCS.rglob("*.md")]
    shown = [
        (page.name, line)
        for page in pages
        if page.name != "CHANGELOG.md" and "." not in page.parent.name
        for line in commands_in(page.read_text("utf-8"))
    ]
    assert len(shown) > 200
    assert [f"{name}: {line}: {why}" for name, line in shown if (why := find_fault(line))] == []


def test_the_page_of_commands_has_every_command() -> None:
    shown = " ".join(commands_in((DOCS / "commands.md").read_text("utf-8")))
    assert [name for name in cli.list_commands(click.Context(cli)) if f"plait {name} " not in shown] == []


def commands_in(text: str) -> Iterator[str]:
    """`plait …` and `python FOLDER/…` between backticks, and lines that begin with them."""
    begin = r"(?:\.venv/bin/)?((?:plait |python (?:benchmarks|tools|examples)/)"
    yield from (" ".join(one.split()) for one in re.findall(f"`{begin}[^`]+)`", text))
    yield from re.findall(rf"^ *(?:\$ )?{begin}.*)$", text, re.MULTILINE)


def find_fault(line: str) -> str:
    """What a command line has that the program has not; "" for nothing."""
    program, *words = shlex.split(re.split(r" #|[|;&]", line)[0].replace("'", ""))
    if program == "python":
        return find_fault_of_script(*words)
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        found = command.get_command(context, words[0])
        if found is None:
            return "" if command.invoke_without_command else f"no command {words[0]}"
        command, words = found, words[1:]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word) and " " not in word]
    return "".join(f"no option {name}" for name in options if name.rstrip(".,:)") not in known)


def find_fault_of_script(path: str, *words: str) -> str:
    """The same of a script, by its text and that of the scripts next to it that it imports."""
    file = ROOT / path
    if not file.is_file():
        return f"no file {path}"
    source = file.read_text("utf-8")
    imported = (file.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", source, re.M))
    source += "".join(other.read_text("utf-8") for other in imported if other.is_file())
    own = words[: words.index("--")] if "--" in words else words
    options = [word.partition("=")[0].rstrip(".,:)") for word in own if re.match(r"--[a-z]", word)]
    return "".join(f"no option {name}" for name in options if f'"{name}"' not in source)


def test_numbers_of_formats_are_those_of_the_tables() -> None:
    calls, thoughts = len(FORMATS), len(REASONING)
    assert f"There are {calls} formats of calls and {thoughts} of thinking" in flatten(DOCS / "apis.md")
    assert f"tool calls in {calls} formats and thinking in {thoughts}" in flatten(ROOT / "CHANGELOG.md")


def flatten(page: Path) -> str:
    """Its text without line breaks."""
    return " ".join(page.read_text("utf-8").split())
