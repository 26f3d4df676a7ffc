"""The frame of the command line: help, exit codes, one line for every error."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait import __version__
from plait.cli.main import COMMANDS, escape_unknown, leave
from plait.errors import (
    BadFile,
    ConfigError,
    InvalidField,
    MissingTensor,
    OutOfMemory,
    UnsupportedModel,
)

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = ROOT / "tests/cli/conftest.py"
Run = Callable[..., Any]


def test_help_names_every_command(plait: Run) -> None:
    result = plait("--help")
    assert result.code == 0
    assert all(f"  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(plait: Run, name: str) -> None:
    result = plait(name, "--help")
    assert result.code == 0
    assert result.out.startswith(f"Usage: plait {name}")


def test_version(plait: Run) -> None:
    assert plait("--version").out == f"plait {__version__}\n"


HEAVY = {"torch", "numpy", "numba", "llvmlite", "tokenizers", "rich", "starlette", "prometheus_client"}


def loaded_by(code: str) -> set[str]:
    """Which modules a new Python has after it."""
    script = f"import sys; {code}; print(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy_and_no_command() -> None:
    loaded = loaded_by("from plait.cli.main import run; run(['--help'])")
    assert not loaded & HEAVY
    assert "plait.cli.generate" not in loaded


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "warmup"])
def test_the_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    assert not loaded_by(f"from plait.cli.main import run; run([{name!r}, '--help'])") & HEAVY


def test_importing_plait_loads_nothing_heavy() -> None:
    assert not loaded_by("import plait; plait.SamplingParams()") & (HEAVY | {"click", "plait.engine"})


def test_the_front_of_a_server_loads_neither_torch_nor_kernels() -> None:
    loaded = loaded_by("import plait.server.run, plait.server.app, plait.worker.client")
    assert not loaded & {"torch", "numba", "llvmlite", "plait.kernels", "plait.model", "plait.runner"}


ENDING = """
import atexit, sys, threading, time, types
sys.modules["torch"] = types.ModuleType("torch")
from plait.cli import main
atexit.register(lambda: print("told at the end", flush=True))
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread has finished"))).start()
class Kept:
    def __del__(self):
        print("taken apart")
kept = Kept()
sys.stdout.write("no line's end ")
main.leave(CODE)
"""


@pytest.mark.parametrize("code", [0, 3, 130])
def test_a_process_with_torch_ends_in_order_and_is_not_taken_apart(code: int) -> None:
    script = ENDING.replace("CODE", str(code))
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout == "no line's end a thread has finished\ntold at the end\n"
    assert (run.returncode, run.stderr) == (code, "")


def test_a_process_that_a_profiler_watches_ends_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it ended at once"))
    monkeypatch.setattr(sys, "getprofile", lambda: print)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(SystemExit) as ended:
        leave(3)
    assert ended.value.code == 3


def test_what_cannot_be_written_at_the_end_is_an_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = "import sys; sys.modules['torch'] = sys; from plait.cli.main import leave; print('x'); leave(0)"
    held_back = {**os.environ, "PYTHONUNBUFFERED": ""}
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=held_back, stdout=writer, check=False)
    os.close(writer)
    assert run.returncode == 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("juggle",), "there is no command 'juggle'"),
        (("generate", "model", "Once upon"), "argument (Once upon); give it with --prompt"),
        (("run", "model", "Once upon"), "argument (Once upon); give it with --prompt"),
        (("decode", "model", "1,2"), "argument (1,2); give it with --ids"),
        (
            ("generate", "--model", "m", "--temprature", "1"),
            "option '--temprature'; did you mean --temperature",
        ),
        (("serve", "m", "-ngl", "99"), "No such option '-ngl': a model is on one device as a whole"),
        (("serve", "m", "-np", "4"), "No such option '-np'; here it is --max-num-seqs"),
        (("serve", "m", "--ctx-size=4096"), "No such option '--ctx-size'; here it is --max-model-len"),
        (("serve", "m", "--temperature", "1"), "'--temperature': requests have it"),
        (("generate", "m", "-n", "3"), "No such option '-n'; here it is --max-tokens"),
        (("chat", "m", "-vz"), "No such option '-vz' (see `plait chat --help`)"),
        (("generate", "--prompt", "x"), "name a model with --model"),
        (("serve",), "name a model with --model"),
        (("generate", "--model", "m", "--device", "tpu"), "'tpu' is not one of"),
        (("generate", "--model", "m", "--max-tokens", "many"), "'many' is not a valid integer"),
        (("generate", "--model", "m", "--ids", "1,two"), "'two' is not a token id"),
        (("generate", "--model", "m", "--memory-limit", "4 elephants"), "is not a number of bytes"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(plait: Run, arguments: tuple[str, ...], message: str) -> None:
    result = plait(*arguments)
    assert result.code == 2
    assert result.err.startswith("plait: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("threads: 0 is less than 1"), 2, "threads: 0 is less than 1"),
        (BadFile("model.gguf: it ends early"), 3, "model.gguf: it ends early"),
        (MissingTensor("layers.0.attn.q"), 3, "layers.0.attn.q"),
        (UnsupportedModel("architecture 'X' is not known"), 3, "architecture 'X' is not known"),
        (OutOfMemory("12 GiB are needed"), 4, "12 GiB are needed"),
        (InvalidField("top_p: 2 is outside [0, 1]", "top_p"), 2, "top_p: 2 is outside [0, 1]"),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't\nallocate memory: 9 bytes"), 4, "out of memory"),
        (
            FileNotFoundError(2, "No such file or directory", "nowhere"),
            3,
            "nowhere: No such file or directory",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "torch is not installed; `pip install",
        ),
        (ModuleNotFoundError("No module named 'plait.x'", name="plait.x"), 1, "a fault of Plait"),
        (RuntimeError("can't start new thread"), 4, "no thread can be started: this user, or the container"),
        (KeyboardInterrupt(), 130, ""),
        (
            ZeroDivisionError("division by zero"),
            1,
            f"ZeroDivisionError: division by zero (a fault of Plait or of a plug-in at {CONFTEST}, line ",
        ),
    ],
)
def test_every_error_is_one_line_and_its_exit_code(
    plait: Run, engine: Any, error: BaseException, code: int, message: str
) -> None:
    engine.at_load = error
    result = plait("generate", "--model", "m", "--prompt", "x")
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert result.out == ""


def test_debug_shows_the_traceback(plait: Run, engine: Any) -> None:
    engine.at_load = BadFile("model.gguf: it ends early")
    result = plait("generate", "--model", "m", "--prompt", "x", "--debug")
    assert result.code == 3
    assert "Traceback" in result.err
    assert result.err.endswith("plait: model.gguf: it ends early\n")


def test_a_reader_that_leaves_hears_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plait", "--help"]
    run = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def test_ctrl_c_while_the_command_line_is_imported_shows_no_traceback() -> None:
    script = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'plait.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from plait.__main__ import run_plait\n"
        "run_plait()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_characters_that_stdout_lacks_are_escaped() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="latin-1")
    escape_unknown(stream)
    stream.write("Größe \N{MUSICAL NOTE}\udce9")
    stream.flush()
    assert written.getvalue() == "Größe \\U0001f3b5\\udce9".encode("latin-1")
    escape_unknown(io.StringIO())
    escape_unknown(None)


def plait_with(streams: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`plait` from a shell that redirects its streams like this; what it wrote into those that are left."""
    command = ["sh", "-c", f'"$@" {streams}', "sh", sys.executable, "-m", "plait", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("streams", "out"), [("2>&-", True), ("<&-", True), (">&-", False), ("<&- >&- 2>&-", False)]
)
def test_streams_that_are_closed_lead_nowhere(streams: str, out: bool) -> None:
    ran = plait_with(streams, "--version")
    assert (ran.returncode, ran.stderr, bool(ran.stdout)) == (0, "", out)


def test_closed_streams_have_their_numbers_and_children_inherit_them() -> None:
    script = (
        "from plait.__main__ import open_missing_streams as f; f(); import os, sys;"
        "numbers = [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)];"
        "assert numbers == [0, 1, 2], numbers; assert all(map(os.get_inheritable, numbers));"
        "assert sys.stdin.read() == ''; print('x', flush=True); print('x', file=sys.stderr)"
    )
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_line(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for command in (["--version"], ["config", "--all", "--json"]):  # less than a buffer holds, and more
        ran = plait_with(">/dev/full", *command)
        message = "plait: stdout, or a file, cannot be written: No space left on device\n"
        assert (ran.returncode, ran.stderr) == (1, message)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "model\udcff.gguf"),
        ("serve", "model.gguf", "--host", "\udcff"),
        ("serve", "model.gguf", "--lora", "a=\udcff"),
    ],
)
def test_arguments_that_are_not_utf8_are_refused(plait: Run, arguments: tuple[str, ...]) -> None:
    result = plait(*arguments)
    assert result.code == 2
    assert "has bytes that are not UTF-8 here; write it in UTF-8" in result.err
    assert result.err.count("\n") == 1
