"""Startups from an image: the same replies without torch; an image that may be wrong is not used."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.loading.image import file_format
from plait.loading.image.file_format import read_image
from plait.loading.image.start import find_image, load_image

SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "threads": 2, "device": "cpu"}
SCRIPT = """
import json, sys
from plait import LLM, SamplingParams

model, options = sys.argv[1], json.loads(sys.argv[2])
prompts = ["And it came to pass", "In the beginning " * 9, "the"]
settings = [
    dict(temperature=0.0), dict(temperature=0.9, seed=5, top_p=0.9, top_k=40, min_p=0.01),
    dict(temperature=0.7, seed=1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    dict(temperature=0.0, logit_bias={7: 3.0}, stop=["e"]),
]
with LLM(model, **options) as llm:
    found = {"texts": [], "embedding": None}
    for one in settings:
        outs = llm.generate(prompts, SamplingParams(max_tokens=12, **one))
        found["texts"].append([list(out.outputs[0].token_ids) for out in outs])
    again = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))
    found["cached"] = [out.num_cached_tokens for out in again]
    found["again"] = [list(out.outputs[0].token_ids) for out in again]
    found["embedding"] = llm.embed(prompts, "mean")
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    rare = ("torch", "numba", "prometheus_client", "asyncio", "http", "email", "ssl")
    lean = [name for name in rare if name in sys.modules or f"/{name}/" in mapped]
    found["kind"] = llm.step_kind
    out = llm.generate(prompts[0], SamplingParams(max_tokens=3, temperature=0.0, logprobs=2))[0]
    found["logprobs"] = [{t: e.logprob for t, e in one.items()} for one in out.outputs[0].logprobs]
    found["scores"] = llm.score(prompts)
    found["logits"] = llm.logits(prompts[0]).sum().item()
print(json.dumps([found, lean]))
"""


@pytest.fixture(scope="module")
def model(nano_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path_factory.mktemp("image") / "model"))


@pytest.fixture(scope="module")
def cache(model: Path, kernel_folder: Path) -> Path:
    made = model.parent / "cache"
    made.mkdir()
    (made / "kernels").symlink_to(kernel_folder)
    return made


def run(model: Path, cache: Path, **options: Any) -> tuple[dict[str, Any], list[str], str]:
    """(replies, which of `rare` the process had loaded for the first of them, what it logged)."""
    given = json.dumps({**SIZES, "cache_dir": str(cache), **options})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), given], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, lean = json.loads(done.stdout.splitlines()[-1])
    return found, lean, done.stderr


@pytest.fixture(scope="module")
def first(model: Path, cache: Path) -> dict[str, Any]:
    """The replies of the run that keeps the image."""
    found, loaded, _ = run(model, cache)
    assert loaded[:2] == ["torch", "numba"]
    assert len(list((cache / "images").iterdir())) == 1
    return found


def same_replies(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in one.keys() - {"kind"}:
        assert one[key] == other[key], key


def test_replies_are_the_same_and_neither_torch_nor_numba_is_loaded(
    first: dict[str, Any], model: Path, cache: Path
) -> None:
    found, loaded, errors = run(model, cache)
    assert loaded == []
    assert "from the startup image" in found["kind"]
    assert "Traceback" not in errors
    same_replies(first, found)
    assert max(found["cached"]) > 0, "prefixes are found in memory"


@pytest.mark.slow
def test_so_they_are_with_drafts_and_other_sizes_of_memory(
    first: dict[str, Any], model: Path, cache: Path
) -> None:
    run(model, cache, speculate="ngram")
    found, loaded, _ = run(model, cache, speculate="ngram", memory_limit=64 << 20, prefix_cache=False)
    assert loaded == []
    assert found["texts"] == first["texts"]


@pytest.mark.slow
def test_so_they_are_with_weights_in_blocks(model: Path, cache: Path) -> None:
    """Where there is AMX, these have kernels on its tiles: a process has to request them."""
    kept, _, _ = run(model, cache, quantize="q8_0")
    found, loaded, _ = run(model, cache, quantize="q8_0")
    assert loaded == []
    same_replies(kept, found)


def image_of(model: Path, cache: Path) -> Path:
    found = find_image(str(model), EngineConfig(**SIZES, cache_dir=str(cache)))
    assert found is not None
    return found[0]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 4321, -1)


def of_older_format(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(file_format.MAGIC, b"plaitim0", 1))


def with_key(**changed: object) -> Callable[[Path], None]:
    """Write the same image, sound and whole, as of a model with another key."""

    def write(path: Path) -> None:
        image = read_image(path)
        assert image is not None
        key = {**image.header.key, **changed}
        header = file_format.msgspec.structs.replace(image.header, key=key)
        file_format.write_image(path, header, [image.code], [image.constants])

    return write


def flip_constant(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def without_weights(path: Path) -> None:
    for packed in (path.parent.parent / "packed").iterdir():
        packed.unlink()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (cut, "cut off"),
        (empty, "cut off"),
        (flip, "damaged"),
        (flip_constant, "damaged"),
        (open_to_others, "another user may have written it"),
        (give_away, "another user may have written it"),
        (of_older_format, "or of another version"),
        (with_key(threads=99), "of another model or of other options"),
        (with_key(machine=["another-processor"]), "of another model or of other options"),
        (with_key(code=["0.0.1", "another version"]), "of another model or of other options"),
        (without_weights, "cannot be opened"),
    ],
)
def test_what_cannot_be_trusted_is_ignored_with_one_line(
    first: dict[str, Any], model: Path, cache: Path, tmp_path: Path, harm: Any, why: str,
    caplog: pytest.LogCaptureFixture, never_links: None,
) -> None:  # fmt: skip
    own = Path(shutil.copytree(cache, tmp_path / "cache", symlinks=True))
    config = EngineConfig(**SIZES, cache_dir=str(own))
    path = image_of(model, own)
    if harm is not without_weights:
        harm(path)
        assert load_image(str(model), config) is None
    else:  # of which the image names the place: the folder that was copied
        moved = cache / "packed"
        moved.rename(cache / "away")
        try:
            assert load_image(str(model), config) is None
        finally:
            (cache / "away").rename(moved)
    (line,) = caplog.messages
    assert "the startup image is not used" in line
    assert why in line


def test_weights_that_are_mapped_count_as_taken_when_memory_is_divided(
    first: dict[str, Any], model: Path, cache: Path
) -> None:
    """The run that keeps an image has its packed weights in memory; the next one has them in a file."""
    image = read_image(image_of(model, cache))
    assert image is not None
    (packed,) = (cache / "packed").glob("*.packed")
    assert 0.9 * packed.stat().st_size < image.header.model.mapped_nbytes <= packed.stat().st_size
    assert [file.path for file in image.header.files].count(str(packed.resolve())) == 1


def test_a_changed_model_and_another_option_have_no_image(
    first: dict[str, Any], model: Path, cache: Path, tmp_path: Path
) -> None:
    config = EngineConfig(**SIZES, cache_dir=str(cache))
    assert find_image(str(model), config) is not None
    for other in ({"precise": True}, {"threads": 1}, {"startup_image": "off"}, {"ops": "reference"}):
        assert find_image(str(model), EngineConfig(**{**SIZES, "cache_dir": str(cache), **other})) is None
    changed = Path(shutil.copytree(model, tmp_path / "changed"))
    os.utime(next(changed.glob("*.safetensors")), (1, 1))
    assert find_image(str(changed), config) is None


def test_another_processor_and_another_version_have_no_image(
    first: dict[str, Any], model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**SIZES, cache_dir=str(cache))
    for name, value in (("host_target", lambda: "another"), ("__version__", "0.0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(f"plait.loading.image.key.{name}", value)
            assert find_image(str(model), config) is None
    assert find_image(str(model), config) is not None


def open_folder(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize(("harm", "why"), [(open_folder, "others may write"), (give_away, "another user")])
def test_a_folder_that_others_may_write_has_none(
    first: dict[str, Any], model: Path, cache: Path, tmp_path: Path, harm: Any, why: str,
    caplog: pytest.LogCaptureFixture, never_links: None,
) -> None:  # fmt: skip
    own = Path(shutil.copytree(cache, tmp_path / "cache", symlinks=True))
    harm(own / "images")
    assert load_image(str(model), EngineConfig(**SIZES, cache_dir=str(own))) is None
    (line,) = caplog.messages
    assert "the startup image is not used" in line
    assert why in line


def fill_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_the_image_and_nothing_else(
    first: dict[str, Any], model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(shutil.copytree(cache, tmp_path / "cache", symlinks=True))
    image_of(model, own).unlink()
    others = [*(own / "images").iterdir()]
    monkeypatch.setattr(os, "posix_fallocate", fill_disk)
    with LLM(str(model), **SIZES, cache_dir=str(own)) as llm:
        said = llm.keep_image(1 << 40)
        out = llm.generate("the", SamplingParams(max_tokens=12, temperature=0.0))[0]
    assert list(out.outputs[0].token_ids) == first["texts"][0][2]
    assert said == "startup image: none is kept: it cannot be written (No space left on device)"
    assert [*(own / "images").iterdir()] == others


def test_a_disk_that_fills_up_while_an_image_is_written_leaves_the_old_one(
    first: dict[str, Any], model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(image_of(model, cache), tmp_path))
    before, image = path.read_bytes(), read_image(path)
    assert image is not None
    monkeypatch.setattr(os, "fsync", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        file_format.write_image(path, image.header, [image.code], [image.constants])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before
