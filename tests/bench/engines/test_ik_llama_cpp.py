"""ik_llama.cpp is two programs. Here they are scripts that say what they were given, in its forms."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.bench.engines.child import load_side
from plait.bench.engines.ik_llama_cpp_engine import describe_build
from plait.bench.model.compare import PEERS, SIDES, contestant
from plait.cli.bench import parse_options
from plait.errors import ConfigError

SCRIPT = str(SIDES / PEERS["ik_llama.cpp"])
BENCH = """
import json, sys
args = sys.argv[1:]
def of(name): return args[args.index(name) + 1]
if of("-m") .endswith("broken.gguf"): sys.exit("no such file")
made = {"-gp": of("-gp").split(",")[1]} if "-gp" in args else {}
milliseconds = 7 * int(made.get("-gp", 0)) or 2 * int(of("-p"))
print("a line before")
print(json.dumps([{"samples_ns": [milliseconds * 1000000], "rtr": of("-rtr")}]))
"""
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
args = sys.argv[1:]
if args == ["--version"]: sys.exit("version: 4321 (COMMIT)\\nbuilt with cc")
if args[args.index("-m") + 1].endswith("unread.gguf"): sys.exit("unknown architecture")
open("llama.log", "w").close()
paths = "defined" if "-rtr" in args else "NOT defined"
print(f"====== HAVE_FANCY_SIMD is {paths}", file=sys.stderr, flush=True)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self): self.say("{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["cache_prompt"] is False and asked["ignore_eos"] and asked["temperature"] == 0
        ids = [asked["prompt"][-1] + i for i in range(asked["n_predict"])]
        if asked["prompt"] == [13]: ids.pop()
        if asked["prompt"] == [14]: return self.say("no such token", status=500)
        assert asked["stream"] and asked.get("logprobs") == (1 if self.path == "/v1/completions" else None)
        last = {"timings": {"predicted_ms": 100.0 * len(asked["prompt"])}}
        if self.path == "/v1/completions":
            last |= {"choices": [{"text": "", "logprobs": None}], "usage": {"completion_tokens": len(ids)}}
            if asked["prompt"] == [15]: ids.pop(1)  # it ends within a character
        shown = [{"logprobs": {"content": [{"id": one, "token": "a"}]}, "text": "a"} for one in ids]
        events = [*({"choices": [one]} for one in shown), last]
        self.say(*(f"data: {one}\\n\\n" for one in [*map(json.dumps, events), "[DONE]"]))
    def say(self, *parts, status=200):
        self.send_response(status); self.end_headers(); self.wfile.write("".join(parts).encode())
ThreadingHTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    for name, text in (("llama-bench", BENCH), ("llama-server", SERVER)):
        (folder / name).write_text(f"#!{sys.executable}{text}".replace("COMMIT", "abc123"))
        (folder / name).chmod(0o755)
    return folder


def load(programs: Path, model: str = "model.gguf", *, repack: bool = False) -> Any:
    options = {"programs": str(programs), "repack": repack}
    return load_side(SCRIPT)(model=model, threads=2, max_model_len=64, max_num_seqs=3, options=options)


@pytest.fixture(scope="module")
def side(programs: Path) -> Iterator[Any]:
    side = load(programs, repack=True)
    yield side
    side.close()
    assert side.server.poll() is not None


def test_it_says_its_build_and_whether_the_fast_paths_are_on(side: Any, programs: Path) -> None:
    assert side.facts == {
        "engine": "ik_llama.cpp -rtr",
        "version": "abc123, AVX-512 paths on",
        "threads": 2,
    }
    plain = load(programs)
    plain.close()
    assert plain.facts["version"] == "abc123, AVX-512 paths off"
    assert plain.facts["engine"] == "ik_llama.cpp"


def test_a_build_without_a_commit_is_known_by_its_hash(programs: Path, tmp_path: Path) -> None:
    found = []
    for text in ("", "# another build"):
        server = tmp_path / "llama-server"
        server.write_text((programs / "llama-server").read_text().replace("abc123", "unknown") + text)
        server.chmod(0o755)
        found.append(describe_build(tmp_path))
    assert all(
        re.fullmatch("built without a commit, llama-server SHA-256 [0-9a-f]{12}", one) for one in found
    )
    assert found[0] != found[1]


def test_one_user_is_timed_by_llama_bench_and_texts_are_the_servers(side: Any) -> None:
    assert not Path("llama.log").exists(), "it writes that where it runs"
    assert side.prefill([1] * 512, "llm") == pytest.approx(1.024)
    assert side.decode([1] * 20, 128, "llm") == pytest.approx(0.896)  # the tokens, without the prompt
    assert side.greedy([[5], [6, 9]], 3) == [[5, 6, 7], [9, 10, 11]]
    with pytest.raises(RuntimeError, match="llama-server reports 2 of 3 ids"):
        side.greedy([[5], [13]], 3)
    with pytest.raises(RuntimeError, match=r"refuses 3 tokens on /v1/completions.*500.*no such token"):
        side.greedy([[14]], 3)
    assert side.greedy([[15]], 3) == [[15, 17, -1]], "an id that the server does not show"
    together = side.batch([[1, 2], [3] * 4, [5]], 8, "llm")
    assert (together["tokens"], together["decode_tokens"]) == (24, 21)
    assert together["decode_seconds"] == pytest.approx(0.1)
    assert together["seconds"] > 0


def test_what_it_cannot_read_or_find_is_reported(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="reads GGUF files"):
        load(programs, "folder")
    with pytest.raises(NotImplementedError, match=r"llama-bench, llama-server.*ik_llama\.cpp@FOLDER"):
        load(tmp_path)
    with pytest.raises(RuntimeError, match=r"did not load unread\.gguf: unknown architecture"):
        load(programs, "unread.gguf")
    with pytest.raises(RuntimeError, match="llama-bench ended with code 1: no such file"):
        load(programs, "broken.gguf")


def test_compare_names_the_folder_and_the_form(programs: Path) -> None:
    who = contestant(f"ik_llama.cpp-rtr@{programs}=other.gguf", "model.gguf", {"threads": 2}, parse_options)
    assert (who.name, who.model, who.is_plait) == ("ik_llama.cpp-rtr", "other.gguf", False)
    assert who.options == {"programs": str(programs), "repack": True}
    plain = contestant(f"ik_llama.cpp@{programs}", "model.gguf", {}, parse_options)
    assert (plain.model, plain.options["repack"]) == ("model.gguf", False)
    for where in ("", "@/nowhere"):
        with pytest.raises(ConfigError, match=r"name the folder of its programs: ik_llama\.cpp@FOLDER"):
            contestant(f"ik_llama.cpp{where}", "model.gguf", {}, parse_options)
