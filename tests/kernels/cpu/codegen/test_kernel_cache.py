"""The cache of compiled kernels: keyed by what decides the code, shared by installs, used only if whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plait.kernels.cpu.codegen import target
from plait.kernels.cpu.codegen.kernel import SIGNATURE, Kernel, NativeEntry, load_generated
from plait.kernels.cpu.codegen.kernel_cache import name_of, read_content
from plait.kernels.cpu.codegen.kernel_folder import seal, unseal
from plait.kernels.cpu.codegen.vec import put_i64
from plait.kernels.cpu.runtime.threads import call_entry

ROOT = Path(__file__).resolve().parents[4]
START = """
import logging, sys
from pathlib import Path
logging.basicConfig(stream=sys.stderr, format="%(message)s")
from plait.kernels.cpu.codegen import target
target.keep_in(Path(sys.argv[1]))
from plait.kernels.cpu.runtime import written
assert Path(written.__file__).is_relative_to(Path.cwd()), written.__file__
written.rows_by_hand.address
print(int(written.rows_by_hand.compile_s > 0), target.cached_files().unkept is None)
"""
WRITTEN = Path("plait", "kernels", "cpu", "runtime", "written.py")  # a kernel's file, in an install
TEXT = """
from plait.kernels.cpu.codegen.kernel import inline, kernel
{head}

@inline
def helped(x):
    return x + {number}

@kernel
def rows_{title}(frame, args, thread, threads):
    put_i64(args, helped(get_i64(args)) + OFFSET)
"""


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{START}"]
    return subprocess.Popen([*command, str(cache)], cwd=folder, stdout=-1, stderr=-1, text=True)


def compiled(process: subprocess.Popen[str]) -> tuple[bool, bool, str]:
    """(whether it compiled, whether the next run loads it, what it logged)."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    made, is_kept = out.split()
    return made == "1", is_kept == "True", err


def copy(folder: Path) -> Path:
    shutil.copytree(ROOT / "plait", folder / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / WRITTEN).write_text(text("by_hand"))
    return folder


def test_two_installs_share_hand_written_kernels_and_a_changed_one_compiles_its_own(tmp_path: Path) -> None:
    one, other, cache = copy(tmp_path / "one"), copy(tmp_path / "other"), tmp_path / "cache"
    at_once = [start(one, cache), start(other, cache)]
    assert sorted(compiled(process)[0] for process in at_once) == [False, True]  # one waited for the other
    source = other / WRITTEN
    source.write_text(source.read_text() + "\n# changed\n")
    assert [compiled(start(folder, cache)) for folder in (other, one, other)] == [
        (True, True, ""),
        (False, True, ""),
        (False, True, ""),
    ]


def test_kernels_that_cannot_be_kept_are_compiled_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made, is_kept, log = compiled(start(copy(tmp_path / "one"), tmp_path / "file"))
    assert (made, is_kept, log.count("\n")) == (True, False, 1)
    assert str(tmp_path / "file") in log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for kernels of this test."""
    monkeypatch.setattr(target, "_kept", [])
    target.keep_in(tmp_path)
    room = target.room_in(tmp_path)
    assert room is not None
    return room


def text(title: str, head: str = "OFFSET = 1", number: int = 5) -> str:
    needed = "from plait.kernels.cpu.codegen.vec import get_i64, put_i64"
    return TEXT.format(head=f"{needed}\n{head}", title=title, number=number)


def made(title: str, source: str | None = None) -> Kernel:
    module = load_generated(f"test_{title}", source or text(title))
    return Kernel(getattr(module, f"rows_{title}").function)


@pytest.mark.parametrize("damage", [b"", b"plaitkn1", seal("x", b"x")])
def test_a_damaged_kernel_is_compiled_again_and_replaced(
    folder: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert (made("damaged").address > 0, made("damaged").compile_s) == (True, 0.0)
    (path,) = folder.glob("*.kernel")
    path.write_bytes(damage)
    again = made("damaged")
    assert (again.address > 0, again.compile_s > 0) == (True, True)
    assert "is damaged" in caplog.text
    assert unseal(path.name, path.read_bytes()) is not None
    loaded = made("damaged")
    assert (loaded.address > 0, loaded.compile_s) == (True, 0.0)


def test_what_is_whole_and_cannot_be_loaded_is_compiled_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = made("unreadable")
    name = name_of(read_content(kernel.function, SIGNATURE))  # type: ignore[arg-type]
    folder.mkdir(parents=True)
    (folder / name).write_bytes(seal(name, b"no pickle"))
    assert kernel.address > 0
    assert kernel.compile_s > 0
    assert "cannot be loaded" in caplog.text


def test_an_entry_is_kept_too(folder: Path) -> None:
    def twice(place: int, x: int) -> None:
        put_i64(place, x * 2)

    found = np.zeros(1, np.int64)
    for _ in range(2):
        call_entry(NativeEntry(twice).address)(found.ctypes.data, 21)
        assert found[0] == 42
        found[0] = 0
    assert len(list(folder.glob("*twice*.kernel"))) == 1


def test_a_name_changes_with_the_text_its_helpers_and_its_numbers() -> None:
    def named(kernel: Kernel) -> str:
        return name_of(read_content(kernel.function, SIGNATURE))  # type: ignore[arg-type]

    plain = named(made("names"))
    assert named(made("names")) == plain
    assert named(made("names", text("names", number=6))) != plain
    helpers = [load_generated("test_helper", text("helper", number=number)).__name__ for number in (1, 2)]
    numbers = [load_generated("test_number", f"OFFSET = {offset}").__name__ for offset in ("1", "(2, 3)[1]")]
    body = text("names").replace("return x +", "return other(x) +")
    by_helper = [named(made("names", body)) for _ in range(1)]
    for helper in helpers:
        module = load_generated("test_names", body)
        module.other = sys.modules[helper].helped  # type: ignore[attr-defined]
        by_helper.append(named(Kernel(module.rows_names.function)))
    assert len(set(by_helper)) == 3
    by_number = []
    for number in numbers:
        module = load_generated("test_names", body)
        module.OFFSET = sys.modules[number].OFFSET  # type: ignore[attr-defined]
        by_number.append(named(Kernel(module.rows_names.function)))
    assert len(set(by_number)) == 2
