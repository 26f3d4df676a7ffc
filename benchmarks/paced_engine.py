"""The server of `front.py`: `plait serve`'s HTTP and text over an engine that computes nothing.

python benchmarks/paced_engine.py PORT STEP_MS

A token is a byte. In every step each open stream gets the next byte of its prompt, from the first again
after the last. All tokens of a step are put from one thread, as those of an engine's process are. `plait` is
that of PYTHONPATH, so that a server may be of another revision.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from plait.config import ServerConfig
from plait.frontend.loop_bridge import wake_together
from plait.request import Event, Request
from plait.server.run import serve_front
from tests.server.fake import BOS, EchoLoop, fake_front

LATE_S = 0.05  # a step that is later than this is not made up for


@dataclass(slots=True)
class OpenStream:
    """A request that gets tokens, and how many it has."""

    request: Request
    on_event: Callable[[Event], None]
    text: bytes
    count: int = 0

    def advance(self) -> Event:
        """Its next token."""
        token = self.text[self.count % len(self.text)]
        self.count += 1
        is_last = self.count >= self.request.params.max_tokens
        return Event(self.request.id, 0, (token,), finish_reason="length" if is_last else None)


class PacedLoop(EchoLoop):
    """Gives every open stream a token each `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s, self._streams = step_s, dict[str, OpenStream]()
        threading.Thread(target=self._run_steps, daemon=True).start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        text = bytes(i for i in request.prompt_token_ids if i < BOS)
        with self._lock:
            self.open[request.id] = {0}
            self._streams[request.id] = OpenStream(request, on_event, text)

    def _run_steps(self) -> None:
        for _ in self._steps():
            with self._lock:
                streams = list(self._streams.values())
            with wake_together():
                for stream in streams:
                    event = stream.advance()
                    if event.finish_reason:
                        self.cancel(event.request_id)
                        with self._lock:
                            del self._streams[event.request_id]
                    stream.on_event(event)

    def _steps(self) -> Iterator[None]:
        at = time.monotonic()
        while True:
            at = max(at + self._step_s, time.monotonic() - LATE_S)
            time.sleep(max(at - time.monotonic(), 0))
            yield


def main() -> None:
    port, step_ms = int(sys.argv[1]), float(sys.argv[2])
    front = fake_front()
    front.loop = PacedLoop(step_ms / 1000)
    serve_front(lambda report: front, ServerConfig(port=port))


if __name__ == "__main__":
    main()
