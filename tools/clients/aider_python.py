"""aider, as a command: over OpenAI's API and over Ollama's, streamed and whole."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, QUESTION, URL, report

QUIET = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")


def ask(model: str, *options: str) -> str:
    """What aider prints for one message."""
    servers = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "x", "OLLAMA_API_BASE": URL}
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"{model}/{MODEL}", *QUIET, *options]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [*command, "--no-pretty", "--chat-mode", "ask", "--message", QUESTION],
            cwd=home,
            env={**os.environ, **servers, "HOME": home},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert "received." in done.stdout, done.stdout[-300:]  # "Tokens: 84 sent, 6 received."
    return done.stdout


def chat() -> None:
    ask("openai", "--no-stream")
    ask("ollama_chat", "--no-stream")


def stream() -> None:
    ask("openai", "--stream")
    ask("ollama_chat", "--stream")


report(chat=chat, stream=stream)
