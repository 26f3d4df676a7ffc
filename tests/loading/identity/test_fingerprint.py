"""Fingerprints follow weights, text and arithmetic alone: while they stay, equal seeds mean equal replies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from plait import LLM
from plait.engine.fingerprint import Fingerprint
from plait.frontend.reply_digest import measure_digest
from plait.kernels.load import KernelTarget, describe_target
from plait.loading.identity import fingerprint as module
from plait.loading.identity.fingerprint import fingerprint


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path / "model"))


def open_model(model: Path, **options: Any) -> LLM:
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1, "startup_image": "off"}
    return LLM(str(model), device="cpu", **(sizes | options))


def made(model: Path, **options: Any) -> Fingerprint:
    with open_model(model, **options) as llm:
        return fingerprint(llm._loaded.opened, llm._loaded.target)


def test_a_copy_served_with_other_sizes_and_threads_has_the_same_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    first = made(model)
    assert first.arithmetic.startswith("fp_")
    assert (len(first.model), len(first.arithmetic)) == (16, 19)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "prefix_cache": False, "threads": 2}
    assert made(copy, **sizes) == first


def test_what_changes_numbers_changes_the_arithmetic_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(model) as llm:
        opened, target = llm._loaded.opened, llm._loaded.target
        found = [fingerprint(opened, target)]

        def other(name: str, value: object) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                found.append(fingerprint(opened, target))

        def compiled(**_: object) -> KernelTarget:
            known = describe_target()
            assert known is not None
            return KernelTarget(known.name, known.dot, known.features, known.room, "other", known.formats)

        other("__version__", "9.9.9")
        other("hash_code", lambda parts: "other kernels")
        other("describe_target", compiled)
        other("host_target", lambda: "another processor")
        target.state_dtype = "bfloat16"
        found.append(fingerprint(opened, target))
    found.append(made(model, precise=True))
    assert len({one.arithmetic for one in found}) == len(found)
    assert len({one.model for one in found}) == 1


def test_threads_and_the_processor_count_where_a_library_computes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(model, ops="reference") as llm:
        opened, target = llm._loaded.opened, llm._loaded.target
        found = [fingerprint(opened, target)]
        monkeypatch.setattr("torch.get_num_threads", lambda: 77)
        found.append(fingerprint(opened, target))
    assert found[0] != found[1]


def test_isa_makes_machines_equal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = describe_target()
    if known is None:
        pytest.skip("there are no kernels here")
    with open_model(model) as llm:
        opened, target = llm._loaded.opened, llm._loaded.target
        native = fingerprint(opened, target)
        monkeypatch.setattr(module, "describe_target", lambda **_: known)
        object.__setattr__(opened.config, "isa", "avx2")  # a process compiles for one target only
        here = fingerprint(opened, target)
        monkeypatch.setattr(module, "host_target", lambda: "another processor")
        assert fingerprint(opened, target) == here != native


def test_other_weights_texts_and_options_of_text_are_other_models(model: Path) -> None:
    found = [made(model), made(model, quantize="q8_0"), made(model, open_objects=True)]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    found.append(made(model))
    with (model / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    found.append(made(model))
    template = model / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    found.append(made(model, chat_template=str(template)))
    template.write_text("{{ messages[0]['content'] }} ")
    found.append(made(model, chat_template=str(template)))
    assert len({one.model for one in found}) == len(found)
    assert len({one.arithmetic for one in found}) == len(found)


def test_another_pooling_is_another_model(model: Path) -> None:
    (model / "modules.json").write_text('[{"type": "sentence_transformers.Pooling", "path": "1_Pooling"}]')
    (model / "1_Pooling").mkdir()
    found = []
    for mode in ("lasttoken", "mean"):
        (model / "1_Pooling" / "config.json").write_text(f'{{"pooling_mode": "{mode}"}}')
        found.append(made(model))
    assert found[0].model != found[1].model


def test_digest_is_of_the_numbers_and_not_of_sizes(model: Path) -> None:
    digests = []
    for options in ({}, {"max_num_batched_tokens": 16, "threads": 2}, {"quantize": "q8_0"}):
        with open_model(model, **options) as llm:
            front = llm._loaded.front
            digests.append(measure_digest(front))
            assert measure_digest(front) == digests[-1]  # from the cache, too
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16
