"""`plait cache`: what is kept, how large and how old; and its removal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.packed_cache.file_format import encode_header
from plait.kernels.cpu.codegen.kernel_folder import KernelFiles
from plait.loading.kernel_trials.verdicts import TrialSite, find_folder, keep_verdicts

Run = Callable[..., Any]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two folders of kernels, one of them unused for nine days, packed weights and findings."""
    for room in ("new", "old"):
        KernelFiles(tmp_path / "kernels" / room).write("rows.kernel", b"code" * 300)
    for folder, name in (("packed", f"nano-{'0' * 16}.packed"), ("probes", "abc.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(encode_header(b"{}"))
    then = time.time() - 9 * 86_400
    os.utime(tmp_path / "kernels" / "old" / "rows.kernel", (then, then))
    return tmp_path


def names(plait: Run, base: Path) -> list[str]:
    shown = json.loads(plait("cache", "--json", "--cache-dir", str(base)).out)
    return [f"{one['kind']} {one['name']}" for one in shown]


def test_it_lists_what_is_kept_with_sizes_and_ages(plait: Run, base: Path) -> None:
    shown = plait("cache", "--cache-dir", str(base))
    assert shown.code == 0
    new, old, packed, found, total = shown.out.splitlines()
    assert [line.split()[:2] for line in (new, old)] == [["kernels", "new"], ["kernels", "old"]]
    assert (old.endswith("9 days ago"), "just now" in new) == (True, True)
    assert (packed.split()[:2], found.split()[:2]) == (["packed", "nano"], ["findings", "abc"])
    assert str(base) in total
    assert names(plait, base) == ["kernels new", "kernels old", "packed nano", "findings abc"]


def test_clean_removes_all_but_findings_which_must_be_named(plait: Run, base: Path) -> None:
    told = plait("cache", "clean", "--cache-dir", str(base))
    assert (told.code, "freed" in told.out) == (0, True)
    assert names(plait, base) == ["findings abc"]
    assert plait("cache", "clean", "findings", "--cache-dir", str(base)).code == 0
    assert names(plait, base) == []
    assert "nothing is kept" in plait("cache", "--cache-dir", str(base)).out


def test_clean_can_be_bounded_by_kind_and_by_age(plait: Run, base: Path) -> None:
    plait("cache", "clean", "kernels", "--unused-days", "7", "--cache-dir", str(base))
    assert names(plait, base) == ["kernels new", "packed nano", "findings abc"]
    plait("cache", "clean", "packed", "--cache-dir", str(base))
    assert names(plait, base) == ["kernels new", "findings abc"]


def test_a_folder_that_is_not_there_is_empty_and_is_not_made(plait: Run, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert "nothing is kept" in plait("cache", "--cache-dir", str(none)).out
    assert plait("cache", "clean", "--cache-dir", str(none)).code == 0
    assert not none.exists()


def test_options_in_a_place_where_they_do_nothing_are_refused(plait: Run, base: Path) -> None:
    told = plait("cache", "--cache-dir", str(base), "clean")
    assert (told.code, "clean" in told.err) == (2, True)
    assert len(names(plait, base)) == 4


def test_without_a_home_a_folder_must_be_named(plait: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for arguments in (("cache",), ("cache", "clean"), ("warmup", "--clear")):
        told = plait(*arguments)
        assert (told.code, "--cache-dir" in told.err) == (2, True)
    assert plait("doctor", "--json").code in (0, 1)
    shown = plait("doctor")
    assert "there is no home folder" in shown.out


def test_trials_of_gpu_kernels_are_listed_and_removed(plait: Run, tmp_path: Path) -> None:
    site = TrialSite("H200, sm_90", "570", "2.13", "3.6", "abc")
    keep_verdicts(find_folder(str(tmp_path)), site, {"a/b//float32": ""})
    assert names(plait, tmp_path) == [f"trials {site.digest}"]
    assert plait("cache", "clean", "trials", "--cache-dir", str(tmp_path)).code == 0
    assert names(plait, tmp_path) == []
