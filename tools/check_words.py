"""Words and sentences of the prose, as docs/glossary.md has them, and paths that the docs mention.

`python tools/check_words.py` prints every breach of these rules and exits with 1:

* prose in CHECKED has none of the words of the glossary's first column. Prose is Markdown without code, block
  quotes and addresses, and the docstrings and comments of Python files;
* nor have the texts that users meet (errors, log lines, help), which are the strings of some words in SPOKEN,
  and the names of tests;
* in MEASURED nine sentences in ten have at most WORDS words;
* in DOCS a path in backticks, and the target of a relative link, exists;
* in CLASSES_IN the classes in backticks exist, and ARCHITECTURE's reading path has fewer than READING lines.

`--table` also prints the sentences of every file, `--long` those that are too long. Files and folders as
arguments are held to the words instead of CHECKED: `python tools/check_words.py plait/engine`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORDS = 25
DOCS = (
    *("README.md", "CONTRIBUTING.md", "docs"),
    *("benchmarks/README.md", "examples/README.md", "tests/contract/README.md"),
)
MEASURED = DOCS
# What is held to the words: Markdown files, Python files, or folders of both. Add a folder when it is clean.
CHECKED = (*DOCS, "plait", "tests", "tools", "benchmarks", "examples")
# Where strings are for users: everything but generated code, samples of text, and patterns.
SPOKEN = ("plait", "tools", "benchmarks")
NOT_SPOKEN = (
    *("plait/kernels/", "plait/bench/model/measure.py"),
    *("tools/check_words.py", "benchmarks/engine_speculation.py"),
)
FEW_WORDS, LONGEST_TEXT = 4, 600  # shorter strings are names; longer ones are samples or code
# Files that a reader is to write, or not to write.
MADE_UP = ("l2_norm", "softsign", "utils.py", "FILE_side.py", "FILE.py")
OUTPUT = ("build", "dist", "site")  # what programs write: there or not, it is no file of ours
ARCHITECTURE, READING = "docs/ARCHITECTURE.md", 2000
CLASSES_IN = (ARCHITECTURE, "docs/cpu-step.md", "docs/gpu-step.md")
GLOSSARY = "docs/glossary.md"  # it has to name the words that it replaces

_PREPOSITION = r"in|at|behind|beside|below|above|on|around|before|where|as"
_FILES = r"weights|files?|folders?|checkpoints?|caches?|kernels?|model|config|text|button|box"
_TEXT = r"lines?|text|string|word|file|sequence|prompt|reply|row|range|block|axis|step|loop"
_MANY = r"linear|plain|dense|quantized|small|large|whole|other|fused|all|each|one|a|another"
_STARTS = r"a|each|every|next|new|fresh|several|no|faster|later"
_PROMPTS = r"(?:a |the |each )?(?:prompts?|texts?)"
# The glossary's first column -> its uses, and what in the same paragraph makes the word plain English. Where
# plain English has a word too, the pattern has the words next to it that our old meaning had: `start` is
# avoided after an article (`a start packs the weights`), not as a verb (`start the server`), nor of a text.
RULES: dict[str, tuple[str, str]] = {
    "state of fixed size": (r"states? of (?:a )?fixed size", ""),
    "linear map": (
        rf"(?:{_MANY}) maps?(?! of the)|maps? of (?:weights|floats|blocks|\w+ rows)|maps? (?:whose|alone)",
        "",
    ),
    "turned away": (r"turn(?:s|ed|ing)? (?:\w+ )?away", ""),
    "watched": (r"watched|(?:some|any|no)body watches|(?:readers?|clients?) watch(?:es)?", ""),
    "guess": (r"guess(?:es|ed|ing)?", ""),
    "told": (r"told|tells", ""),
    # A file lies beside the weights; a number or an engine is compared with another.
    "beside": (rf"beside(?! (?:(?:the|its|their|a|one) )?(?:\w+'?s? ){{0,2}}(?:{_FILES})\b)", ""),
    "nobody": (r"nobody|whoever|(?:every|any|some)body", ""),
    # `who` is for people (users, clients, readers), not for requests and sequences.
    "who": (r"who (?:runs|waits|fails|ends|shares?|shared|makes)|(?:only|just) who", ""),
    "stands in": (rf"st(?:ands?|ood) (?:{_PREPOSITION})(?! for)", ""),
    "whose": (r"whose", ""),
    "company": (r"(?:in|its|their|any|whatever) company", ""),
    "pieces": (rf"in (?:\w+ )?pieces|(?:prompt|uneven) pieces|pieces? of {_PROMPTS}", ""),
    "put down": (r"puts? down|putting down|noted|notes that", ""),
    # `the books` are accounts; `a book` is to be read.
    "books": (r"(?:the|its|their|own) books|books (?:are|were|of|agree|balance)", ""),
    "mended": (r"mend(?:s|ed|ing)?", ""),
    "room": (r"rooms?", r"(?:chat|living|meeting) rooms?"),
    "house": (r"house", r"House of|in-house"),
    "floor": (r"floors?", r"floor (?:division|of \w\b)|floor\("),
    "door": (r"doors?", ""),
    "wish": (r"wish(?:es|ed)?", r"(?:as|if|whenever) you wish"),
    "asked": (r"asked", r"asked questions"),
    "wanted": (r"wanted", ""),
    "to part": (
        r"parts? (?:from|ways)|parted|(?:texts?|prompts?|repl(?:y|ies)) parts?(?! of)|(?:will|may) part",
        "",
    ),
    # A span is one of a trace (OpenTelemetry) or of HTML.
    "span": (r"spans?", r"[Tt]rac(?:e|es|ing)\b|OTLP|OpenTelemetry|HTML"),
    "ends of prompts": (r"ends of (?:prompts|messages)", ""),
    "a start": (
        rf"(?:{_STARTS}) starts?(?! (?:of|and end of) (?:the |a |each )?(?:{_TEXT})\b"
        r"| (?:index|token|position|time|offset|method|event)s?\b)",
        "",
    ),
    "speech": (r"speech", ""),
    "said": (r"(?<!That )said(?! to\b)", ""),
    "parcel": (r"parcels?", ""),
    "courier": (r"couriers?", ""),
    "shelf": (r"shel(?:f|ves)", r"off the shelf"),
    "ledger": (r"ledgers?", ""),
    # Pages of memory have 4 KiB, and browsers show pages; the block of signs of life is neither.
    "page (memory)": (r"(?:shared|status|one) pages?(?: of memory)?", r"[Bb]rowser|HTML"),
}
# Lines of a passage stay apart, so a blank of a pattern may be a line break.
_USES = {word: re.compile(rf"\b(?:{use})\b".replace(" ", r"\s"), re.I) for word, (use, _) in RULES.items()}
_PLAIN = {word: re.compile(plain) for word, (_, plain) in RULES.items() if plain}


class Passage(NamedTuple):
    """Prose without a blank line: a paragraph, an item of a list, a cell of a table, a docstring's part."""

    line: int
    text: str
    measured: bool = True  # whether it is made of sentences; headings and cells are not


_INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
_NEW_BLOCK = re.compile(r"^\s*(?:[-*+]|\d+\.) ")
_LINK = re.compile(r"\]\([^)\s]*\)")


def _fenced(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(number, line) with code, block quotes and comments as blank lines."""
    fence, shown = None, ""
    for number, line in enumerate(lines, 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        indented = line.startswith("    ") and not shown.strip()  # else it goes on with an item of a list
        hidden = fence is not None or mark is not None or indented or line.startswith((">", "<!--"))
        if mark and fence is None:
            fence = mark[1]
        elif mark and fence is not None and mark[1].startswith(fence):
            fence = None
        shown = "" if hidden else line
        yield number, shown


def _plain(text: str) -> str:
    """Inline code as one word, links as their text, no emphasis."""
    text = _INLINE_CODE.sub("`code`", text)
    return re.sub(r"\*\*|(?<!\w)[*_]|[*_](?!\w)|[\[\]]", "", _LINK.sub("]", text))


def markdown(text: str) -> Iterator[Passage]:
    first, held = 0, ""

    def passages() -> Iterator[Passage]:
        if held.strip():
            yield Passage(first, _plain(held).strip())

    for number, line in _fenced(text.split("\n")):
        table, heading = line.lstrip().startswith("|"), line.startswith("#")
        if not line.strip() or table or heading or _NEW_BLOCK.match(line):
            yield from passages()
            first, held = 0, ""
        if table or heading:
            cells = re.split(r"(?<!\\)\|", _INLINE_CODE.sub("`code`", line)) if table else [line.lstrip("# ")]
            yield from (Passage(number, _plain(cell).strip(), False) for cell in cells if cell.strip(" -:"))
        elif line.strip():
            held = f"{held}\n{line.strip()}" if held else _NEW_BLOCK.sub("", line, count=1)
            first = first or number
    yield from passages()


def python(text: str) -> Iterator[Passage]:
    """Docstrings, by paragraph, and comments, those of neighbouring lines together."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if doc := ast.get_docstring(node):
            first = node.body[0].lineno
            yield from (Passage(first + part.line - 1, part.text) for part in markdown(doc))
    first, last, held = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:noqa|type:|fmt:|pragma|!)", token.string):
            continue
        if token.start[0] != last + 1 and held:
            yield Passage(first, _plain(held))
            held = ""
        first, last = (first if held else token.start[0]), token.start[0]
        held = f"{held}\n{token.string.lstrip('# ')}".lstrip()
    if held:
        yield Passage(first, _plain(held))


def spoken(text: str) -> Iterator[Passage]:
    """The strings of a Python file that users may meet: one line of some words. Values count as `code`."""
    tree, inner = ast.parse(text), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(part for value in node.values for part in ast.walk(value))
        elif isinstance(node, ast.Expr):
            inner.add(node.value)  # a docstring
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (value.value if isinstance(value, ast.Constant) else "`code`" for value in node.values)
            found = "".join(map(str, parts))
        else:
            found = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        is_text = len(re.findall(r"[A-Za-z]{2,}", found)) >= FEW_WORDS and not re.search(r"[\n<]", found)
        if is_text and len(found) <= LONGEST_TEXT:
            yield Passage(node.lineno, found, False)


def test_names(text: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Passage(node.lineno, node.name.replace("_", " "), False)


def prose(path: Path, root: Path = ROOT) -> list[Passage]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return list(markdown(text))
    where, found = path.relative_to(root).as_posix(), list(python(text))
    if where.startswith(SPOKEN) and not where.startswith(NOT_SPOKEN):
        found += spoken(text)
    return [*found, *test_names(text)]


def files(root: Path, places: tuple[str, ...], kinds: tuple[str, ...]) -> Iterator[Path]:
    for place in places:
        path = root / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (one for one in found if one.suffix in kinds)


def avoided(root: Path = ROOT, places: tuple[str, ...] = CHECKED) -> list[str]:
    """Every use of a word that the glossary replaces, as `file:line: "use": write …`."""
    write, found = glossary(root), []
    for path in files(root, places, (".md", ".py")):
        where = path.relative_to(root).as_posix()
        for line, text, _ in prose(path, root) if where != GLOSSARY else ():
            for word, pattern in _USES.items():
                if word in _PLAIN and _PLAIN[word].search(text):
                    continue
                for use in pattern.finditer(text):
                    at, words = line + text.count("\n", 0, use.start()), " ".join(use[0].split())
                    found.append(f'{where}:{at}: "{words}": write {write.get(word, "otherwise")}')
    return found


def glossary(root: Path = ROOT) -> dict[str, str]:
    """The glossary's table of words: avoided -> written instead."""
    path, found = root / GLOSSARY, {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 4 and cells[1] in RULES:
            found[cells[1]] = cells[2]
    return found


def sentences(path: Path) -> list[tuple[int, int, str]]:
    """(words, line of its passage, sentence) of all that is not a heading, a cell or code."""
    found = []
    for passage in prose(path):
        for sentence in re.split(r"(?<=[.!?])[)”\"']?\s+(?=[A-Z0-9`(“\"])|(?<=:)\s*$", passage.text):
            if passage.measured and (words := len(re.findall(r"\w\S*|`code`", sentence))):
                found.append((words, passage.line, sentence))
    return found


def percentile(counts: list[int]) -> int:
    """The 90th: the least number that nine in ten do not pass."""
    return sorted(counts)[max(0, -(-len(counts) * 9 // 10) - 1)] if counts else 0


def long_winded(root: Path = ROOT) -> list[str]:
    found = []
    for path in files(root, MEASURED, (".md",)):
        if (words := percentile([count for count, _, _ in sentences(path)])) > WORDS:
            where = path.relative_to(root).as_posix()
            found.append(
                f"{where}:1: one sentence in ten has more than {words - 1} words, the limit is {WORDS}"
            )
    return found


def table(root: Path = ROOT) -> str:
    rows = ["   90th %  sentences  words"]
    for path in files(root, DOCS, (".md",)):
        counts = [count for count, _, _ in sentences(path)]
        rows.append(f"{percentile(counts):9}  {len(counts):9}  {sum(counts):5}  {path.relative_to(root)}")
    return "\n".join(rows)


_PATH = re.compile(r"\.?\w[\w.*-]*(?:/[\w.*-]+)*/?")


@cache
def _names(root: Path) -> frozenset[str]:
    """Every file name below the folders of code."""
    tops = ("plait", "tests", "tools", "benchmarks", "docs", "examples")
    return frozenset(path.name for top in tops for path in (root / top).rglob("*.*"))


def exists(name: str, root: Path, here: Path) -> bool:
    """Whether a path of a document is there: from the root, from `plait/`, or from the document."""
    for base in (root, root / "plait", here):
        for candidate in (name.rstrip("/"), f"{name}.py"):
            if any(base.glob(candidate)):
                return True
    return False


def is_path(name: str, root: Path) -> bool:
    """Whether a name in backticks means a file of ours: `schedule/plan`, `tools/`, `sampler.py`."""
    if any(part in name for part in MADE_UP):
        return False
    if not _PATH.fullmatch(name) or "/" not in name:
        return bool(re.fullmatch(r"\w+\.py", name))
    top = name.split("/")[0]
    if top in OUTPUT:
        return False
    return (root / top).is_dir() or (root / "plait" / top).is_dir()


def missing_paths(root: Path = ROOT) -> list[str]:
    """Paths in backticks and targets of links that are not there, as `file:line: path`."""
    found = []
    for path in files(root, DOCS, (".md",)):
        where = path.relative_to(root).as_posix()
        for number, line in _fenced(path.read_text(encoding="utf-8").split("\n")):
            for name in re.findall(r"`([^`]+)`", line):
                known = (
                    name in _names(root) or exists(name, root, path.parent) if is_path(name, root) else True
                )
                found += [] if known else [f"{where}:{number}: `{name}` does not exist"]
            for target in re.findall(r"\]\(([^)#\s]+)", line):
                if "://" not in target and not (path.parent / target).exists():
                    found.append(f"{where}:{number}: ({target}) does not exist")
    return found


def unknown_classes(root: Path = ROOT) -> list[str]:
    """Names in backticks of CLASSES_IN that look like a class, or its member, and are none of ours."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "plait").rglob("*.py")))
    found = []
    for page in CLASSES_IN:
        for number, line in _fenced((root / page).read_text(encoding="utf-8").split("\n")):
            for name, member in re.findall(r"`([A-Z][a-z]+\w*)(?:\.([a-z_]\w*))?`", line):
                if not re.search(rf"\bclass {name}\b", source):
                    found.append(f"{page}:{number}: there is no class {name}")
                elif member and not re.search(rf"\b{member}\b", source):
                    found.append(f"{page}:{number}: {name} has no {member}")
    return found


def reading_path(root: Path = ROOT) -> dict[str, int]:
    """The files that ARCHITECTURE lists under its heading "How a token is made", with their lines."""
    text = (root / ARCHITECTURE).read_text(encoding="utf-8")
    section = text.partition("\n## How a token is made\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)
    return {name: len((root / "plait" / name).read_bytes().splitlines()) for name in names}


def long_reading(root: Path = ROOT) -> list[str]:
    lines = sum(reading_path(root).values())
    return [f"{ARCHITECTURE}:1: its reading path has {lines} lines"] if lines >= READING else []


def main() -> int:
    if "--table" in sys.argv:
        print(table())
    if "--long" in sys.argv:
        for path in files(ROOT, DOCS, (".md",)):
            for words, line, text in sentences(path):
                if words > WORDS:
                    print(f"{path.relative_to(ROOT)}:{line}: {words}: {text}")
    places = tuple(place for place in sys.argv[1:] if not place.startswith("--"))
    found = [
        *avoided(places=places or CHECKED),
        *long_winded(),
        *missing_paths(),
        *unknown_classes(),
        *long_reading(),
    ]
    print(
        "\n".join(found) if found else "words: the prose has the glossary's words, and what it names exists"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
