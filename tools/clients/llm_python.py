"""llm, as a command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, PARAMETERS, QUESTION, URL, report


def prompt(*options: str) -> str:
    """What llm prints for one prompt."""
    model = {"model_id": "here", "model_name": MODEL, "api_base": f"{URL}/v1", "supports_schema": True}
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps([model]), "utf-8")  # JSON is YAML
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "here", QUESTION, "-o", "max_tokens", "96", *options],
            env={**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "x"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout


def chat() -> None:
    assert prompt("--no-stream").strip()


def stream() -> None:
    assert prompt().strip()


def schema() -> None:
    assert "city" in json.loads(prompt("--schema", json.dumps(PARAMETERS)))


report(chat=chat, stream=stream, schema=schema)
