"""How Plait's own processes import torch: begun early, without what no engine needs, and never in half."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from plait.loading import torch_preload
from plait.loading.torch_preload import NATIVE, OURS, THEIRS, Absent, TorchStart

ROOT = Path(__file__).resolve().parents[2]


def said(script: str) -> str:
    """What a new Python prints for it."""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_torch_computes_and_what_only_meta_tensors_need_is_not_there() -> None:
    script = (
        "import sys; from plait.loading.torch_preload import TorchStart; TorchStart().finish(); import torch;"
        "print((torch.ones(2, 3) @ torch.ones(3)).tolist(), torch.empty(2, device='meta').shape.numel());"
        "print('torch._meta_registrations' in sys.modules, 'torch._prims' in sys.modules);"
        "import torch._meta_registrations as it;"
        "print(hasattr(it, 'activate_meta'), 'torch._prims' in sys.modules)"
    )
    assert said(script).splitlines() == ["[3.0, 3.0] 2", "False False", "True True"]


@pytest.mark.sampled(2, across="heavy")
def test_absent_module_is_imported_when_an_attribute_is_read() -> None:
    script = (
        "from plait.loading.torch_preload import TorchStart; TorchStart().finish(); import torch;"
        "print(callable(torch._meta_registrations.activate_meta))"
    )
    assert said(script) == "True"


def test_a_name_that_the_missing_module_does_not_have_is_an_attribute_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Absent("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", absent)
    with pytest.raises(AttributeError, match="__path__"):
        absent.__path__  # noqa: B018
    assert sys.modules["colorsys"] is absent  # Python's own questions bring nothing
    with pytest.raises(AttributeError, match="no_such_colour"):
        absent.no_such_colour  # noqa: B018
    assert absent.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_where_torch_is_there_already_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_preload, "_library", lambda: pytest.fail("it was looked for"))
    TorchStart().finish()


def test_nothing_is_mapped_alone_of_a_build_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_preload, "find_spec", lambda name: spec)
    assert torch_preload._library() is None
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libtorch_cpu.so").touch()
    assert torch_preload._library() == folder / "libtorch_cpu.so"
    (folder / "libtorch_cuda.so").touch()
    assert torch_preload._library() is None


def test_a_library_that_cannot_be_mapped_is_left_to_torchs_own_import(tmp_path: Path) -> None:
    broken = tmp_path / "libtorch_cpu.so"
    broken.write_bytes(b"\x7fELF, but no more than that")
    torch_preload._map(broken)  # neither an error nor the end of the process


def test_finish_reports_that_torch_is_missing() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from plait.loading.torch_preload import TorchStart;"
        "TorchStart().finish()\n"
        "try:\n    import plait.loading.build\nexcept ImportError as error:\n    print(error)"
    )
    assert "torch" in said(script)


def test_what_is_imported_meanwhile_needs_no_torch() -> None:
    names = ", ".join(OURS)
    assert said(f"import sys, {names}; print('torch' in sys.modules)") == "False"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python has other libraries of its own")
def test_what_is_imported_meanwhile_brings_no_library_that_would_wait_for_torchs() -> None:
    script = (
        "import plait.cli.generate, importlib.machinery as m; from plait.loading import torch_preload as t\n"
        f"t._import_some({NATIVE!r})\n"
        "found, create = [], m.ExtensionFileLoader.create_module\n"
        "def note(self, spec):\n    found.append(spec.name)\n    return create(self, spec)\n"
        "m.ExtensionFileLoader.create_module = note\n"
        f"t._import_some({OURS + THEIRS!r})\n"
        "print(found)"
    )
    assert said(script) == "[]"
