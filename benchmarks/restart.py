"""A long conversation on a server that gets SIGKILL with all its processes: what the next turn costs then.

python benchmarks/restart.py examples/nano-hybrid --set max_seq_len=32768
python benchmarks/restart.py MODEL --tokens 8000 --quantize q8_0

The first server is killed in the middle of its reply, the second behind one. Each next one gets 20 new tokens
behind all that came before; two without the disk cache compute the same turns from their beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEW, REPLY, CUT = 20, 32, 24  # tokens of a turn, of its reply, and of the reply that is cut by a kill
QUIET_S = 0.7  # without another file all is written
START_S = 300.0


@dataclass(frozen=True)
class Turn:
    """A reply, seconds to its first token, and how many tokens of its prompt were computed."""

    token_ids: list[int]
    first_s: float
    num_computed: int


@contextmanager
def serving(model: str, options: Sequence[str], longest: int) -> Iterator[str]:
    """The address of a server, which is killed with all its processes at the end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "plait.cli.main", "serve", model, "--port", str(port), "--cpu"]
    command += ["--max-num-seqs", "2", "--max-model-len", str(longest), *options]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while not _is_healthy(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server does not start: " + " ".join(command))
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def ask(url: str, prompt: Sequence[int], num_tokens: int, cut: int | None = None) -> Turn:
    """One turn. `cut`: stop reading behind so many tokens of the reply."""
    body = {
        "model": "default",
        "prompt": [*prompt],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": 3,
        "temperature": 0.8,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    began, first_s, ids, num_cached = time.monotonic(), 0.0, [], 0
    with urllib.request.urlopen(request, timeout=3600) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                ids += choice.get("token_ids") or []
            if ids and not first_s:
                first_s = time.monotonic() - began
            if usage := chunk.get("usage"):
                num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if cut and len(ids) >= cut:
                break
    return Turn(ids, first_s, len(prompt) - num_cached)


def wait_written(folder: Path) -> None:
    """Writing is behind the reply."""
    seen = -1
    while (now := sum(1 for _ in folder.rglob("*.state"))) != seen:
        seen = now
        time.sleep(QUIET_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the first prompt [default: 30000]")
    parser.add_argument("--vocab", type=int, default=4096, help="token ids are below it [default: 4096]")
    given, options = parser.parse_known_args()
    luck = random.Random(1)
    longest = given.tokens + 2048

    def draw(count: int) -> list[int]:
        return [luck.randrange(3, given.vocab) for _ in range(count)]

    prompts, replies = [draw(given.tokens)], []
    with tempfile.TemporaryDirectory() as name:
        kept = ("--cache-disk", name)
        for turn in range(3):
            with serving(given.model, [*options, *kept], longest) as url:
                reply = ask(url, prompts[-1], REPLY, CUT if not turn else None)
                if turn:
                    wait_written(Path(name))
            what = "killed in mid-reply" if not turn else "killed behind it"
            print(f"turn {turn + 1}: {reply.first_s:.3f} s to its first token, {what}", flush=True)
            if turn:
                print(f"  computed {reply.num_computed} of {len(prompts[-1])} tokens, {NEW} of them new")
            replies.append(reply)
            prompts.append([*prompts[-1], *reply.token_ids, *draw(NEW)])
    is_same = True
    for turn in (1, 2):
        with serving(given.model, options, longest) as url:
            cold = ask(url, prompts[turn], REPLY)
        is_same = is_same and cold.token_ids == replies[turn].token_ids
        times = cold.first_s / replies[turn].first_s
        print(
            f"turn {turn + 1} from its beginning: {cold.first_s:.3f} s, {times:.1f} times as long", flush=True
        )
    print("the same tokens" if is_same else "OTHER TOKENS")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
