"""What a waiting user sees on stderr: how far loading is, and at the end how fast it was."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

MIN_PROMPT, MIN_WRITTEN = 64, 8  # tokens from which on the speed of reading, or writing, is reported
FIRST = "reading headers"  # a model may have to be fetched for that, which draws bars of its own


EVERY_S = 10.0  # without a terminal, so often a line says that work goes on


class Status:
    """What goes on, on stderr: one line that is written over on a terminal, else a line every ten seconds.

    Use as a context manager around work that writes nothing for long. `is_quiet`: it writes nothing.
    """

    def __init__(self, text: str, *, is_quiet: bool = False) -> None:
        self._text, self._started = text, time.perf_counter()
        self._is_terminal = sys.stderr.isatty() and not is_quiet
        self._ended = threading.Event()
        self._thread = (
            None if self._is_terminal or is_quiet else threading.Thread(target=self._run, daemon=True)
        )

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def say(self, text: str) -> None:
        """Show this text from now on."""
        self._text = text
        if self._is_terminal:
            print(f"\r\x1b[K{text} …", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line off the terminal, before something else is written there."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            seconds = time.perf_counter() - self._started
            print(f"plait: {self._text}, {seconds:.0f} s so far", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


class LoadingBar:
    """A progress bar while a model loads; without a terminal a line every ten seconds.

    Use as a context manager and pass `update` as `on_progress`. `is_quiet`: it writes nothing.
    """

    def __init__(self, title: str, *, is_quiet: bool = False) -> None:
        self._title, self._is_quiet = title, is_quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._lines = Status(title, is_quiet=is_quiet or sys.stderr.isatty())

    def __enter__(self) -> Self:
        self._lines.__enter__()
        return self

    def update(self, text: str, done: int, total: int) -> None:
        """`done` of `total` steps of what `text` says."""
        self._lines.say(f"{self._title}: {text}")
        if self._progress is None and text != FIRST and sys.stderr.isatty() and not self._is_quiet:
            self._start()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text, completed=done, total=total)

    def _start(self) -> None:
        # rich takes 60 ms to import, which a pipe should not pay.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(self._title, total=None)
        self._progress.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.__exit__(kind, error, trace)
        if self._progress is not None:
            self._progress.stop()


def console() -> Console:
    """Where tables are written: as wide as the terminal, or 200 columns in a file."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


class Clock:
    """Times one generation: to the first token, and from there to the last."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def prompt_tokens(self, num_tokens: int) -> None:
        """Record how many the prompt has, where it is known only now."""
        self._num_prompt_tokens = num_tokens

    def tokens(self, num_tokens: int) -> None:
        """Record that so many tokens have been written by now."""
        if num_tokens > self._num_tokens:
            self._last = time.perf_counter()
            if not self._num_tokens:
                self._first = self._last
            self._num_tokens = num_tokens

    def context_note(self, max_model_len: int) -> str | None:
        """What to say where prompt and text fill the context, in tokens; None where it is not full."""
        if self._num_prompt_tokens + self._num_tokens < max_model_len:
            return None
        return (
            f"the context is full: prompt and text have {self._num_prompt_tokens} + {self._num_tokens} "
            f"tokens, and it holds {max_model_len} (--max-model-len)"
        )

    def __str__(self) -> str:
        """`120 prompt tokens, 340 tok/s · first token after 0.35 s · 100 tokens, 25.3 tok/s`.

        A speed needs enough tokens, because a step's own time would be reported as that of a few.
        """
        if not self._num_tokens:
            return f"{_count_text(self._num_prompt_tokens, 'prompt token')} · no token written"
        ttft, writing = self._first - self._started, self._last - self._first
        prompt = _count_text(self._num_prompt_tokens, "prompt token")
        if self._num_prompt_tokens >= MIN_PROMPT and ttft:
            prompt += f", {self._num_prompt_tokens / ttft:.0f} tok/s"
        written = _count_text(self._num_tokens, "token")
        if self._num_tokens >= MIN_WRITTEN and writing:
            written += f", {(self._num_tokens - 1) / writing:.1f} tok/s"
        return f"{prompt} · first token after {ttft:.2f} s · {written}"


def _count_text(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
