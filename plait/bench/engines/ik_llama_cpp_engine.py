"""ik_llama.cpp, by the programs of its build: `llama-bench` times one user, `llama-server` writes the texts.

`llama-bench` reports times as JSON and no text, so the server says whether the model is computed as ours is;
it also serves the batches. Both get the same options, `-rtr 1` (weights repacked while loading) among them.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import IO

STARTUP_S = 600.0
FAST_PATHS = "HAVE_FANCY_SIMD is defined"  # its log says so where its AVX-512 kernels are compiled in
DATA = b"data: "  # an event of a stream
NOT_SHOWN = -1  # in place of an id
PROGRAMS = ("llama-bench", "llama-server")
COMMIT = re.compile(r"^version: \d+ \((?!unknown\))(\w+)\)", re.MULTILINE)  # as `--version` reports it


class IkLlamaCppSide:
    """One model in a server that stays idle while `llama-bench` measures. `options`: "programs", the folder
    with both programs, and "repack", whether they get `-rtr 1`.
    """

    def __init__(
        self,
        model: str,
        threads: int | None,
        max_model_len: int,
        max_num_seqs: int,
        options: dict[str, object],
    ) -> None:
        if not model.endswith(".gguf"):
            raise NotImplementedError("ik_llama.cpp reads GGUF files: ik_llama.cpp@FOLDER=FILE.gguf")
        self.folder = find_programs(str(options.get("programs", ""))).resolve()
        self.model, self._file = model, str(Path(model).resolve())
        self.threads, self.is_repacked = threads or 1, bool(options.get("repack"))
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.port = find_port()
        command = [str(self.folder / "llama-server"), "-m", self._file, "-t", str(self.threads)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "-np", str(max_num_seqs)]
        command += ["-c", str((max_model_len + 1) * max_num_seqs), *(["-rtr"] if self.is_repacked else [])]
        self._own = tempfile.TemporaryDirectory()  # it writes a llama.log where it runs
        self.server = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=self._own.name)
        self._wait()
        try:
            self._bench("-p", "1", "-n", "0")  # fails now if it cannot run
            build = describe_build(self.folder)
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, object] = {
            "engine": "ik_llama.cpp -rtr" if self.is_repacked else "ik_llama.cpp",
            "version": f"{build}, AVX-512 paths {self._fast_paths()}",
            "threads": self.threads,
        }

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        self._log.close()
        self._own.cleanup()

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """The new ids of each prompt, one prompt after the other. Raises RuntimeError for fewer than that.

        `/completion` shows no ids, and a whole reply with a cut character is an error there. A stream leaves
        out the id of a token that ends within a character: those behind move up, and NOT_SHOWN fills the end.
        """
        found = []
        for ids in prompts:
            with self._send("/v1/completions", ids, tokens, logprobs=1, stream=True) as lines:
                events = [json.loads(line[len(DATA) :]) for line in lines if line.startswith(DATA + b"{")]
            shown = [one for event in events for one in _read_ids(event)]
            if not shown or (written := _read_count(events[-1])) != tokens:
                raise RuntimeError(f"llama-server reports {written if shown else 0} of {tokens} ids")
            found.append([*shown, *[NOT_SHOWN] * (tokens - len(shown))])
        return found

    def prefill(self, ids: list[int], level: str) -> float:
        """Seconds of a prompt of this length. Its tokens are `llama-bench`'s own."""
        return self._seconds("-p", str(len(ids)), "-n", "0")

    def decode(self, ids: list[int], tokens: int, level: str) -> float:
        """Seconds of `tokens` behind a prompt of this length, without the prompt."""
        return self._seconds("-p", "0", "-n", "0", "-gp", f"{len(ids)},{tokens}")

    def batch(self, prompts: list[list[int]], tokens: int, level: str) -> dict[str, float]:
        """Seconds and tokens of all together, and of the part in which all decode."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(lambda ids: self._count_decode_ms(ids, tokens), prompts))
        return {
            "seconds": time.perf_counter() - started,
            "tokens": len(prompts) * tokens,
            "decode_seconds": min(replies) / 1000,
            "decode_tokens": len(prompts) * (tokens - 1),
        }

    def _count_decode_ms(self, ids: Sequence[int], tokens: int) -> float:
        """Milliseconds that the new tokens of one prompt took. The last event of a stream has them."""
        with self._send("/completion", ids, tokens, stream=True) as lines:
            *_, last = (line for line in lines if line.startswith(DATA + b"{"))
        return _read_decode_ms(json.loads(last[len(DATA) :]))

    def _wait(self) -> None:
        """Wait until the server has loaded. Raises RuntimeError with the end of its log."""
        until = time.monotonic() + STARTUP_S
        while self.server.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
        text = self._read_log()[-500:]
        self.close()
        raise RuntimeError(f"llama-server did not load {self.model}: {text}")

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _fast_paths(self) -> str:
        return "on" if FAST_PATHS in self._read_log() else "off"

    def _bench(self, *lengths: str) -> dict[str, object]:
        """What `llama-bench` reports of one run with these options of lengths."""
        command = [str(self.folder / "llama-bench"), "-m", self._file, "-t", str(self.threads)]
        command += ["-rtr", str(int(self.is_repacked)), "-r", "1", "-o", "json", *lengths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr[-500:]}")
        found: list[dict[str, object]] = json.loads(done.stdout[done.stdout.index("[") :])
        if len(found) != 1:
            raise RuntimeError(f"llama-bench reports another number of tests than one: {len(found)}")
        return found[0]

    def _seconds(self, *lengths: str) -> float:
        (nanoseconds,) = _items(self._bench(*lengths)["samples_ns"])
        return float(str(nanoseconds)) / 1e9

    def _send(self, path: str, ids: Sequence[int], tokens: int, **more: object) -> HTTPResponse:
        """The reply to one prompt, greedy, with nothing from the prefix cache. Raises RuntimeError."""
        body = {
            "prompt": list(ids),
            "n_predict": tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            **more,
        }
        url, kind = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), kind)
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=STARTUP_S)
        except urllib.error.HTTPError as e:
            why = e.read(500).decode(errors="replace")
            raise RuntimeError(f"llama-server refuses {tokens} tokens on {path}: {e}: {why}") from e
        return answer


def find_programs(folder: str) -> Path:
    """The folder of both programs. Raises NotImplementedError where it has none."""
    if not folder or not all((Path(folder) / name).is_file() for name in PROGRAMS):
        raise NotImplementedError(
            f"{folder or 'no folder'} has not both of {', '.join(PROGRAMS)}; "
            "build them and name their folder: ik_llama.cpp@FOLDER"
        )
    return Path(folder)


def find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def describe_build(folder: Path) -> str:
    """The commit of the programs, as `--version` reports it; of a build without one, a hash of the server."""
    server = folder / "llama-server"
    done = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False)
    if found := COMMIT.search(done.stderr + done.stdout):
        return found[1]
    with server.open("rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
    return f"built without a commit, llama-server SHA-256 {digest.hexdigest()[:12]}"


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise RuntimeError(f"ik_llama.cpp reports {value!r} where a list was expected")
    return value


def _read_ids(event: object) -> list[int]:
    """The ids in an event of `/v1/completions` with log-probabilities; the last event has none."""
    value = event
    for key in ("choices", 0, "logprobs", "content"):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and len(value) > key:
            value = value[key]
    return [int(str(row["id"])) for row in _items(value or []) if isinstance(row, dict) and "id" in row]


def _read_count(event: object) -> int:
    """How many tokens the last event of a stream counts."""
    usage = event.get("usage") if isinstance(event, dict) else None
    return int(usage["completion_tokens"]) if isinstance(usage, dict) else 0


def _read_decode_ms(reply: dict[str, object]) -> float:
    """Milliseconds that the new tokens of a reply took."""
    timings = reply.get("timings")
    if not isinstance(timings, dict) or "predicted_ms" not in timings:
        raise RuntimeError("llama-server reports no times")
    return float(timings["predicted_ms"])
