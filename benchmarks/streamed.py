"""Requests at once through `plait serve`, streamed and whole, in turns with OpenVINO in its own process.

python benchmarks/streamed.py model.gguf --openvino PYTHON [--requests 16] [--turns 9]

PYTHON is an interpreter that has openvino-genai. All requests have prompts of 128 token ids and 128 new
tokens, and begin at one moment; every turn of every side has other texts, so no prefix is cached. The client
is in this process and only receives: replies are read after the time was taken. First, Plait's streamed text
must be its whole reply's, and most of OpenVINO's must begin like it. Tokens a second: medians, and the median
of the turns' ratios. JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait.bench import machine  # noqa: E402
from plait.bench.model.compare import SIDES, Side  # noqa: E402
from plait.bench.model.measure import Prompts, round_number  # noqa: E402
from plait.bench.model.memory import footprint  # noqa: E402
from plait.bench.model.run import agreement  # noqa: E402
from plait.bench.serve.server_process import ServerProcess  # noqa: E402

WARM, TIMEOUT_S = 2, 600.0  # turns that do not count: a server's cache grows until it was used once
CHECKED = 16  # tokens of a text that are compared between engines


@dataclass(frozen=True, slots=True)
class ServedReply:
    """What one request got. `events`: those with text."""

    text: str
    tokens: int
    events: int


class Served:
    """`plait serve` and a client that sends all requests at once."""

    def __init__(self, base_url: str) -> None:
        where = urlsplit(base_url)
        self._address = (where.hostname or "", where.port or 80)

    def ask(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, stream: bool
    ) -> tuple[float, list[ServedReply]]:
        """(seconds until the last byte of all replies, the replies)."""
        requests = [self._request(ids, tokens, stream) for ids in prompts]
        parts: list[list[bytes]] = [[] for _ in requests]
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            sockets = [stack.enter_context(socket.create_connection(self._address)) for _ in requests]
            began = time.perf_counter()
            for place, (one, request) in enumerate(zip(sockets, requests, strict=True)):
                one.sendall(request)
                selector.register(one, selectors.EVENT_READ, place)
            while selector.get_map():
                if not (ready := selector.select(TIMEOUT_S)):
                    raise SystemExit(f"the server was silent for {TIMEOUT_S:g} s")
                for key, _ in ready:
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if part := sock.recv(1 << 16):
                        parts[key.data].append(part)
                    else:
                        selector.unregister(sock)
            seconds = time.perf_counter() - began
        return seconds, [read_reply(b"".join(one)) for one in parts]

    def _request(self, ids: Sequence[int], tokens: int, stream: bool) -> bytes:
        body: dict[str, object] = {"prompt": list(ids), "max_tokens": tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "repetition_penalty": 1.0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        return head.encode() + raw


def read_reply(raw: bytes) -> ServedReply:
    """A whole HTTP reply, streamed or not. Exits for one that is an error."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server refused: {head[:60].decode(errors='replace')} {body[:300]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(read_chunks(body))
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    values = [json.loads(line) for line in lines if line != b"[DONE]"] if lines else [json.loads(body)]
    texts = [choice.get("text") or "" for value in values for choice in value.get("choices") or ()]
    usage: Mapping[str, int] = next((v["usage"] for v in reversed(values) if v.get("usage")), {})
    return ServedReply("".join(texts), usage.get("completion_tokens", 0), sum(map(bool, texts)))


def read_chunks(body: bytes) -> Iterator[bytes]:
    """The content of a body in HTTP chunks."""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        yield rest[:length]
        body = rest[length + 2 :] if length else b""


def check_texts(served: Served, peer: Side, prompts: Sequence[list[int]], tokenizer: Any) -> dict[str, Any]:
    """What holds before anything is timed. Exits where the texts are not of one model."""
    _, streamed = served.ask(prompts, CHECKED, stream=True)
    _, whole = served.ask(prompts, CHECKED, stream=False)
    if [one.text for one in streamed] != [one.text for one in whole]:
        raise SystemExit("streamed text is not that of the whole reply, so nothing is measured")
    theirs = peer.greedy(prompts, CHECKED)
    ours = [tokenizer.encode(one.text, add_special=False) for one in whole]
    same = [agreement(a, b) for a, b in zip(ours, theirs, strict=True)]
    if median(same) < 1:
        raise SystemExit(f"most texts begin with other tokens than OpenVINO's: {same}")
    return {"tokens": CHECKED, "openvino_agrees_for": same, "text": whole[0].text}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one model."""
    about = footprint(str(given.model), {})
    prompts = Prompts(about.tokenizer, about.vocab_size)
    threads = given.threads or len(os.sched_getaffinity(0))
    longest = max(512, given.prompt + given.tokens + 1)
    options = ["--cpu", "--max-model-len", str(longest), "--max-num-seqs", str(given.requests)]
    with ExitStack() as stack:
        peer = stack.enter_context(Side("openvino", SIDES / "openvino_engine.py", given.openvino))
        room = {"max_model_len": longest, "max_num_seqs": given.requests}
        facts = peer.load(model=str(given.model), threads=threads, options={}, **room)
        command = [*options, "--threads", str(threads), *given.options]
        server = stack.enter_context(ServerProcess(str(given.model), command))
        served = Served(server.base_url)
        checks = check_texts(served, peer, [prompts(given.prompt, i) for i in range(4)], about.tokenizer)
        rates: dict[str, list[float]] = {"streamed": [], "whole": [], "openvino": []}
        events = list[float]()
        for turn in range(WARM + given.turns):
            for place, side in [*enumerate(rates)][:: 1 if turn % 2 else -1]:
                first = 1000 * (1 + 3 * turn + place)  # another text for each side: Plait has two
                many = [prompts(given.prompt, first + i) for i in range(given.requests)]
                rate = run_side(side, served, peer, many, given.tokens, events)
                if turn >= WARM:
                    rates[side].append(rate)
    pairs = {
        side: median(a / b for a, b in zip(rates[side], rates["openvino"], strict=True))
        for side in ("streamed", "whole")
    }
    return {
        "openvino": facts["version"],
        "threads": threads,
        "checks": checks,
        "events_per_token": round_number(median(events)),
        "tokens_per_second": {side: round_number(median(values)) for side, values in rates.items()},
        "ratio_of_turns": {side: round_number(value) for side, value in pairs.items()},
        "turns": {side: [round_number(value) for value in values] for side, values in rates.items()},
    }


def run_side(
    side: str, served: Served, peer: Side, prompts: Sequence[list[int]], tokens: int, events: list[float]
) -> float:
    """Tokens a second of one turn of one side."""
    if side == "openvino":
        done = peer.ask("batch", prompts=list(prompts), tokens=tokens, level="llm")
        return float(done["tokens"] / done["seconds"])
    seconds, replies = served.ask(prompts, tokens, stream=side == "streamed")
    if any(one.tokens != tokens for one in replies):
        raise SystemExit(f"a reply has another number of tokens than {tokens}")
    if side == "streamed":
        events.append(sum(one.events for one in replies) / (tokens * len(replies)))
    return tokens * len(replies) / seconds


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "What follows -- are options of `plait serve`."
    parser.add_argument("model", type=Path, help="a GGUF file that OpenVINO reads, too")
    parser.add_argument("--openvino", required=True, help="a Python that has openvino-genai")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args(words[:cut], argparse.Namespace(options=words[cut + 1 :]))
    names = ("requests", "prompt", "tokens")
    about = {"model": given.model.name, **{name: getattr(given, name) for name in names}}
    print(json.dumps({"machine": machine.describe(), **about, **measure(given)}, indent=2))


if __name__ == "__main__":
    main()
