"""The checks of `make check`: imports, modules without torch, sizes, names and words."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_imports, check_sizes = tool("check_imports"), tool("check_sizes")
check_names, check_words = tool("check_names"), tool("check_words")
WITHOUT_TORCH = ("plait", *(f"plait.{name}" for name in (*check_imports.NO_TORCH, "cli.main")))
BLOCKED = """
import importlib.util, os, pkgutil, sys, traceback
has_ray = importlib.util.find_spec("ray")
sys.modules["torch"] = None  # makes `import torch` an ImportError
import msgspec, numpy, starlette.applications  # what most of them import, once for all

def import_all(name):
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        needs_ray = ".ray_serve." in found.name and not has_ray
        if name != "plait" and not found.name.endswith("__main__") and not needs_ray:
            importlib.import_module(found.name)
    if name in ("plait", "plait.cli.main"):
        assert "rich" not in sys.modules, "rich was imported at the door"

for name in sys.argv[1:]:
    if not os.fork():  # nothing of Plait is imported there yet
        try:
            import_all(name)
        except BaseException:
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
    print(name)
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "plait" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_circle_of_files_and_one_of_folders_are_named(tmp_path: Path) -> None:
    files = {
        "ops/norm.py": "from plait.ops import rope\n",
        "ops/rope.py": "def f():\n    from plait.ops.norm import norm\n",
        "text/chat/one.py": "import plait.text.output.two\n",
        "text/chat/three.py": "",
        "text/output/two.py": "import plait.text.chat.three\n",
    }
    assert check_imports.broken_circles(write(tmp_path, files)) == [
        "files import each other: ops.norm, ops.rope",
        "folders import each other: text.chat, text.output",
    ]


def test_a_crowded_folder_is_named_unless_its_modules_are_siblings(tmp_path: Path) -> None:
    files = {f"{folder}/m{n}.py": "" for folder in ("text", "families") for n in range(16)}
    assert check_imports.crowded_folders(write(tmp_path, files)) == [
        "plait/text: 16 modules, the limit is 15"
    ]


def test_modules_without_torch_import_with_torch_blocked() -> None:
    command = [sys.executable, "-c", BLOCKED, *WITHOUT_TORCH]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert run.stdout.split() == [*WITHOUT_TORCH]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("ops/norm.py", "from plait.model.decoder import Decoder\n", "tier 2 may not import from tier 3"),
        ("model/mixers/mla.py", "import plait.families.llama\n", "sideways"),
        ("families/llama.py", "from plait.checkpoint import weights\n", "sideways"),
        ("schedule/scheduler.py", "def plan():\n    import torch\n", "must not load torch"),
        ("text/load.py", "from torch import Tensor\n", "must not load torch"),
        ("engine/core.py", "import os\nx = os.environ['A']\n", "only cli/ may read the environment"),
        ("runner/runner.py", "from os import getenv\n", "only cli/ may read the environment"),
        ("ops/rope.py", "from . import norm\n", "relative import"),
        ("model/layers/moe.py", "import plait.kernels.cpu.moe\n", "through plait.kernels.load()"),
        ("utils/text.py", "import plait.errors\n", "utils has no tier"),
    ],
)
def test_a_broken_edge_is_named(tmp_path: Path, file: str, text: str, why: str) -> None:
    blank = {"checkpoint/weights.py": "", "errors.py": ""}
    (edge,) = check_imports.broken_edges(write(tmp_path, {**blank, file: text}))
    assert edge.startswith(f"plait/{file}:")
    assert why in edge


def test_the_sideways_table_is_honoured(tmp_path: Path) -> None:
    files = {
        "families/llama.py": "from plait.checkpoint import names\nimport plait.checkpoint.names\n",
        "checkpoint/names.py": "from plait.errors import PlaitError\nimport torch\n",
        "model/decoder.py": "import plait.checkpoint.weights\nfrom plait.state.store import Store\n",
        "runner/runner.py": "from plait.schedule.plan import Plan\nfrom plait.model.decoder import Decoder\n",
        "cli/serve.py": "import os\nfrom plait.server.run import serve\nx = os.environ\n",
        "__init__.py": "from plait.llm.llm import LLM\n",
    }
    assert check_imports.broken_edges(write(tmp_path, files)) == []


def test_a_long_file_and_a_long_function_are_named(tmp_path: Path) -> None:
    body = "def long():\n" + "    x = 1\n" * 51
    write(tmp_path, {"ops/norm.py": body, "ops/rope.py": "x = 1\n" * 401})
    write(tmp_path, {"kernels/cpu/pointwise/norm.py": body})
    assert check_sizes.too_long(tmp_path) == [
        "plait/ops/norm.py:1: long has 52 lines, the limit is 50",
        "plait/ops/rope.py:1: 401 lines, the limit is 400",
    ]


def test_a_folder_over_its_cap_is_named(tmp_path: Path) -> None:
    write(tmp_path, {f"llm/m{n}.py": "x = 1\n" * 400 for n in range(2)})
    assert check_sizes.too_long(tmp_path) == [f"plait/llm: 800 lines, the cap is {check_sizes.CAPS['llm']}"]


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    text = 'def f():\n    """Long.\n' + "    words\n" * 60 + '    """\n' + "    x = 1\n" * 40
    assert check_sizes.too_long(write(tmp_path, {"ops/norm.py": text})) == []


def test_architecture_has_every_package_in_its_tree() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "plait").rglob("__init__.py")} - {"plait"}
    assert [name for name in sorted(packages) if f"{name}/" not in text] == []


def test_reading_path_of_a_token_is_short() -> None:
    assert 0 < sum(check_words.reading_path().values()) < check_words.READING


def test_glossary_and_word_rules_have_the_same_entries() -> None:
    assert [*check_words.glossary()] == [*check_words.RULES]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("A Mamba keeps a state of fixed size.", "state of fixed size"),
        ("All linear maps are packed.", "linear map"),
        ("A request is turned away.", "turned away"),
        ("A reply that somebody watches.", "watched"),
        ("Three guessed tokens.", "guess"),
        ("The client is told.", "told"),
        ("Faster beside llama.cpp.", "beside"),
        ("Nobody holds the block.", "nobody"),
        ("The reply is equal, who shares the batch.", "who"),
        ("What stands in the file.", "stands in"),
        ("A file whose header is damaged.", "whose"),
        ("The same bits in any company.", "company"),
        ("The prompt is computed in pieces.", "pieces"),
        ("The time is noted.", "put down"),
        ("The books are checked.", "books"),
        ("They are mended.", "mended"),
        ("There is no room for a block.", "room"),
        ("The plan of the house.", "house"),
        ("It imports from floors below.", "floor"),
        ("Every door validates.", "door"),
        ("A wish of the client.", "wish"),
        ("The tokens that were asked for.", "asked"),
        ("The wanted rows.", "wanted"),
        ("Where two prompts part.", "to part"),
        ("A span of 256 tokens.", "span"),
        ("Snapshots at ends of prompts.", "ends of prompts"),
        ("A start packs the weights.", "a start"),
        ("What is said to the client, its speech.", "speech"),
        ("It is said once.", "said"),
        ("A parcel of tokens.", "parcel"),
        ("The courier wakes.", "courier"),
        ("The shelf has tiles.", "shelf"),
        ("The ledger of requests.", "ledger"),
        ("Both share one page of memory.", "page (memory)"),
    ],
)
def test_an_avoided_word_is_found_in_prose(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "a.md").write_text(f"# Title\n\nPlain words.\n{text}\n")
    (tmp_path / "b.py").write_text(f'"""{text}"""\n\nx = 1  # {text}\n')
    found = check_words.avoided(tmp_path, ("a.md", "b.py"))
    use = check_words._USES[word].search(text)[0]
    assert [line for line in found if f'"{use}"' in line][:3] == [
        f'{where}: "{use}": write otherwise' for where in ("a.md:4", "b.py:1", "b.py:3")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Start the server. It starts once, and the start of a line is column 0.",
        "A file beside the weights, and one beside its own checkpoint.",
        "Pages of 4 KiB, and the page of the browser.",
        "A span of the caller's trace.",
        "A fake stands in for the engine. The book of names, and headroom for one part of a prompt.",
        "A user who is known. That said, people who read it may map a file.",
        "In code `whose` and a [link](told.md).",
    ],
)
def test_plain_english_is_no_alarm(tmp_path: Path, text: str) -> None:
    code = "```\ntold = shelf\n```\n\n    parcel\n\n> And he said unto them\n"
    (tmp_path / "a.md").write_text(f"{text}\n\n{code}")
    assert check_words.avoided(tmp_path, ("a.md",)) == []


def test_texts_for_users_and_names_of_tests_are_held_to_the_words(tmp_path: Path) -> None:
    text = """
def test_nobody_waits(found):
    names = {"told": "told", "room left": found}
    sample = "Nobody came to the door,\\n and it was said so"
    raise ValueError(f"{found}: is wanted " "here, and there is no room")
"""
    write(tmp_path, {"server/run.py": text, "kernels/cpu/source.py": text})
    found = check_words.avoided(tmp_path, ("plait",))
    assert found == [
        'plait/kernels/cpu/source.py:2: "nobody": write otherwise',
        'plait/server/run.py:5: "room": write otherwise',
        'plait/server/run.py:5: "wanted": write otherwise',
        'plait/server/run.py:2: "nobody": write otherwise',
    ]


def test_sentences_are_counted_without_code_tables_and_headings(tmp_path: Path) -> None:
    text = "# A heading\n\nOne two `x = y`. Three\nfour (five).\n\n| a | b |\n\n* Six.\n* Seven\n  eight\n"
    (tmp_path / "a.md").write_text(text + "\n```\nno words\n```\n")
    counts = [words for words, _, _ in check_words.sentences(tmp_path / "a.md")]
    assert counts == [3, 3, 1, 2]
    assert check_words.percentile([1] * 9 + [30]) == 1
    assert check_words.percentile([1] * 8 + [30] * 2) == 30


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"schedule/plan.py": ""})
    (tmp_path / "README.md").write_text(
        "`schedule/plan` `schedule/` `plan.py` `a/b` [x](README.md)\n`schedule/no` `no.py` [y](docs/no.md)\n"
    )
    assert check_words.missing_paths(tmp_path) == [
        "README.md:2: `schedule/no` does not exist",
        "README.md:2: `no.py` does not exist",
        "README.md:2: (docs/no.md) does not exist",
    ]


def test_what_programs_wrote_does_not_decide_which_paths_are_ours(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("`build/gpu/rows.jsonl`\n")
    assert check_words.missing_paths(tmp_path) == []
    (tmp_path / "build").mkdir()
    assert check_words.missing_paths(tmp_path) == []


def test_check_sizes_counts_lines_with_loose_types(tmp_path: Path) -> None:
    text = (
        "from typing import Any, cast\n\n"
        '"""Any text, and a cast( of words."""\n'
        "def read(value: Any, place: Any) -> Any:\n    return cast(int, place.bitcast(value))\n"
    )
    write(tmp_path, {"ops/norm.py": text, "ops/rope.py": "Json = Any\n"})
    assert check_sizes.too_loose(tmp_path, most=4) == ["plait/ops/rope.py:1: another name for Any hides it"]
    assert check_sizes.too_loose(tmp_path, most=3)[1] == "plait: 4 lines with Any or cast, the cap is 3"


def test_check_sizes_counts_what_lines_are() -> None:
    text = '"""What\nit is."""\n\nimport os\nfrom a import (\n    b,\n)\n\n# why\nx = os  # code\n'
    found = {"docstrings": 2, "imports": 4, "blank": 2, "comments": 1, "code": 1}
    assert check_sizes.count_kinds(text) == found


@pytest.mark.slow  # `make check` says it, too
def test_lines_with_loose_types_are_within_their_cap() -> None:
    assert check_sizes.too_loose() == []


def test_check_names_names_a_public_class_that_stands_twice(tmp_path: Path) -> None:
    text = "class Plan:\n    pass\n\nclass _Own:\n    pass\n"
    write(tmp_path, {"schedule/plan.py": text, "convert/convert.py": text})
    assert check_names.repeated_classes(tmp_path) == [
        "class Plan is in plait/convert/convert.py:1, plait/schedule/plan.py:1"
    ]


def test_check_names_names_an_import_of_our_own_under_another_name(tmp_path: Path) -> None:
    text = "import numpy as np\nfrom plait.ops import norm as ops\nfrom plait.spec import RopeSpec\n"
    write(tmp_path, {"model/layers/norm.py": text})
    assert check_names.renamed_imports(tmp_path) == [
        "plait/model/layers/norm.py:2: plait.ops.norm is imported as ops"
    ]


@pytest.mark.parametrize(
    "name", ["kept", "held_by_name", "_joined", "compiled", "merged_tables", "cached_in"]
)
def test_check_names_names_a_function_that_is_a_participle(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"engine/core.py": f"def {name}(): ...\n"})
    assert len(check_names.participles(tmp_path)) == 1


@pytest.mark.parametrize(
    "name", ["keep", "paged_attention", "embed", "read_header", "sampling_options", "is_kept"]
)
def test_check_names_lets_verbs_and_terms_of_the_field_pass(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"engine/core.py": f"def {name}(): ...\n"})
    assert check_names.participles(tmp_path) == []


def test_check_names_names_a_method_that_is_a_participle(tmp_path: Path) -> None:
    methods = "def held(self): ...\n    async def _sent(self): ...\n    def send(self): ..."
    methods += "\n    def called(self): ..."
    values = "@property\n    def kept(self): ...\n    @classmethod\n    def made_of(cls): ..."
    write(tmp_path, {"ops/norm.py": f"class Norm:\n    {methods}\n    {values}\n"})
    found = check_names.participle_methods(tmp_path, {"Norm.called": "a library does", "Norm.gone": "once"})
    assert [line.split(" is ")[0] for line in found] == [
        "plait/ops/norm.py:2: Norm.held()",
        "plait/ops/norm.py:3: Norm._sent()",
        "tools/check_names.py: Norm.gone",
    ]
