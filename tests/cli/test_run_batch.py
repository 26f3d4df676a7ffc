"""`plait run-batch` on the small model of the repository: files in, files out, and an honest exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import run


def write(path: Path, *bodies: dict[str, Any]) -> str:
    requests = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    return str(path)


def test_a_file_of_requests_is_answered(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [{"prompt": "And God said", "max_tokens": 5, "temperature": 0}] * 3
    source, target = write(tmp_path / "in.jsonl", *bodies), tmp_path / "out.jsonl"
    options = ["--cpu", "--max-model-len", "256", "--max-num-seqs", "4"]
    assert run(["run-batch", "-i", source, "-o", str(target), *options, str(nano_hybrid)]) == 0
    found = [json.loads(one) for one in target.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == ["0", "1", "2"]
    assert len({one["response"]["body"]["choices"][0]["text"] for one in found}) == 1
    assert "3 answered, 0 of them failed" in capsys.readouterr().err

    write(tmp_path / "in.jsonl", {"prompt": "x", "model": "mine"}, {"prompt": "x", "temperature": -1})
    named = ["--served-model-name", "mine"]
    assert run(["run-batch", "-i", source, "-o", str(target), *options, *named, str(nano_hybrid)]) == 1
    assert "2 answered, 1 of them failed" in capsys.readouterr().err


def test_files_that_cannot_be_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl")
    assert run(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "model"]) == 3
    assert run(["run-batch", "-i", source, "-o", source, "model"]) == 2
    assert run(["run-batch", "-i", source, "-o", str(tmp_path / "no" / "out"), "model"]) == 2
    assert capsys.readouterr().err.count("plait: ") == 3
