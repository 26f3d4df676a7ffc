"""A startup image of a step on AMX: used where tiles are granted and right, and nowhere else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llvmlite import binding
from msgspec.structs import replace

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.kernels.load import load_kernels, why_no_amx
from plait.loading.image import restore
from plait.loading.image.file_format import Image, read_image, write_image
from plait.loading.image.start import find_image, load_image, start_image

permission = import_module("plait.kernels.cpu.codegen.amx_permission")
SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "threads": 2, "device": "cpu", "quantize": "q8_0"}
PROMPTS = ["And it came to pass", "In the beginning " * 20, "the"]  # the second has rows enough for tiles
SCRIPT = """
import json, sys
from plait import LLM, SamplingParams

with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    outs = llm.generate(json.loads(sys.argv[3]), SamplingParams(max_tokens=12, temperature=0.0))
    texts = [list(out.outputs[0].token_ids) for out in outs]
    lean = [name for name in ("torch", "numba") if name in sys.modules]
    print(json.dumps([texts, lean, llm.step_kind]))
"""


@pytest.fixture(scope="module", autouse=True)
def has_amx() -> None:
    load_kernels()
    if why := why_no_amx():
        pytest.skip(f"there is no AMX here: {why}")


@pytest.fixture(scope="module")
def model(nano_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path_factory.mktemp("tiles") / "model"))


@pytest.fixture(scope="module")
def cache(model: Path, kernel_folder: Path) -> Path:
    made = model.parent / "cache"
    made.mkdir()
    (made / "kernels").symlink_to(kernel_folder)
    return made


def tokens(llm: LLM) -> list[list[int]]:
    outs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.fixture(scope="module")
def first(model: Path, cache: Path) -> list[list[int]]:
    """The replies of the run that keeps the image."""
    with LLM(str(model), **SIZES, cache_dir=str(cache)) as llm:
        assert "written to" in llm.keep_image(1 << 40)
        return tokens(llm)


@pytest.fixture
def config(first: list[list[int]], cache: Path, tmp_path: Path) -> EngineConfig:
    """Of a cache folder with a copy of the image."""
    own = Path(shutil.copytree(cache, tmp_path / "cache", symlinks=True))
    return EngineConfig(**SIZES, cache_dir=str(own))


@pytest.fixture
def path(model: Path, config: EngineConfig) -> Path:
    found = find_image(str(model), config)
    assert found is not None
    return found[0]


def opened(path: Path) -> Image:
    image = read_image(path)
    assert image is not None
    return image


@pytest.fixture
def never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if threads of an image are made."""

    def start_threads(*given: object) -> None:
        pytest.fail("threads were made")

    monkeypatch.setattr(restore, "start_threads", start_threads)


@pytest.mark.parametrize(
    ("more", "variants"),
    [({}, {"linear": "native-amx"}), ({"prefill": "bf16"}, {"linear": "amx-bf16"})],
    ids=["bytes", "bfloat16"],
)
def test_an_image_on_tiles_gives_the_same_replies_without_torch_or_numba(
    more: dict[str, str], variants: dict[str, str], model: Path, cache: Path
) -> None:
    options: dict[str, Any] = {**SIZES, **more, "cache_dir": str(cache)}
    with LLM(str(model), **options) as llm:
        assert "startup image" in llm.keep_image(1 << 40)
        expected = tokens(llm)
    found = find_image(str(model), EngineConfig(**options))
    assert found is not None
    image = opened(found[0])
    assert image.header.step.tiles is not None
    for op, variant in variants.items():
        assert variant in image.header.model.bound[op].split("+")
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(options), json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    texts, loaded, kind = json.loads(done.stdout.splitlines()[-1])
    assert "from the startup image" in kind
    assert loaded == []
    assert texts == expected


def test_an_image_without_amx_has_no_check_of_tiles(first: list[list[int]], model: Path, cache: Path) -> None:
    config = EngineConfig(**{**SIZES, "quantize": None}, cache_dir=str(cache))
    with LLM(str(model), **{**SIZES, "quantize": None}, cache_dir=str(cache)) as llm:
        assert "written to" in llm.keep_image(1 << 40)
    found = find_image(str(model), config)
    assert found is not None
    image = opened(found[0])
    assert "amx" not in image.header.model.bound["linear"]
    assert image.header.step.tiles is None


def refuse_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "PERMISSION", (158, 0x1023, 63))  # no such state


def remove_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM finds no tiles; what else it finds stays."""
    real = binding.get_host_cpu_features()
    features = type(real)({**real, "amx-tile": False})
    monkeypatch.setattr(permission, "binding", SimpleNamespace(get_host_cpu_features=lambda: features))


Fake = Callable[[pytest.MonkeyPatch], None]
FAKES = [(refuse_tiles, "the system does not allow it"), (remove_tiles, "this processor has no amx-tile")]


@pytest.mark.parametrize("fake", [fake for fake, _ in FAKES])
def test_a_process_without_tiles_has_another_key(
    fake: Fake, model: Path, config: EngineConfig, path: Path, monkeypatch: pytest.MonkeyPatch,
    never_links: None,
) -> None:  # fmt: skip
    key = opened(path).header.key
    assert isinstance(key, dict)
    assert key["tiles"] is True
    fake(monkeypatch)
    assert find_image(str(model), config) is None
    assert load_image(str(model), config) is None


@pytest.mark.parametrize(("fake", "why"), FAKES)
def test_tiles_that_are_not_granted_are_one_line_whatever_the_key_says(
    fake: Fake, why: str, model: Path, config: EngineConfig, path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, never_links: None,
) -> None:  # fmt: skip
    image = opened(path)
    monkeypatch.setattr("plait.loading.image.key.why_no_tiles", lambda isa: None)
    assert image.header.step.tiles is not None
    fake(monkeypatch)
    assert start_image(str(model), config) is None
    (line,) = caplog.messages
    assert "the startup image is not used: it runs on AMX" in line
    assert why in line


def test_other_isas_request_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def request() -> None:
        pytest.fail("the system was asked")

    monkeypatch.setattr(permission, "request", request)
    assert permission.why_no_tiles("avx512") == "kernels are compiled for avx512"
    monkeypatch.setattr(permission, "request", lambda: None)
    assert permission.why_no_tiles("native") is None
    assert permission.why_no_tiles("amx") is None


@pytest.mark.parametrize(("which", "name"), [(0, "bfloat16"), (1, "bytes"), (2, "signed bytes")])
def test_tiles_with_other_bits_are_one_line_before_a_thread_runs(
    which: int, name: str, model: Path, config: EngineConfig, path: Path,
    caplog: pytest.LogCaptureFixture, never_starts: None,
) -> None:  # fmt: skip
    image = opened(path)
    tiles = image.header.step.tiles
    assert tiles is not None
    documented: list[Any] = list(tiles.documented)
    documented[which] = bytes([documented[which][0] ^ 1]) + documented[which][1:]
    step = replace(image.header.step, tiles=replace(tiles, documented=tuple(documented)))
    write_image(path, replace(image.header, step=step), [image.code], [image.constants])
    assert start_image(str(model), config) is None
    (line,) = caplog.messages
    assert "the startup image is not used: it runs on AMX" in line
    assert f"its products of {name} are not what is documented" in line
