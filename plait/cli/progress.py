"""What a waiting user sees on stderr: how far loading is, and at the end how fast it was."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MIN_PROMPT, MIN_WRITTEN = 64, 8  # tokens from which on it is said how fast they were read, or written
FIRST = "reading headers"  # a model may have to be fetched for that, which draws bars of its own


class Loading:
    """A progress bar while a model loads; nothing at all unless stderr is a terminal.

    Use as a context manager and pass `update` as `on_progress`.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def update(self, text: str, done: int, total: int) -> None:
        """`done` of `total` steps of what `text` says."""
        if self._progress is None and text != FIRST and sys.stderr.isatty():
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
        if self._progress is not None:
            self._progress.stop()


class Clock:
    """Times one generation: to the first token, and from there to the last."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def tokens(self, num_tokens: int) -> None:
        """So many tokens have been written by now."""
        if num_tokens > self._num_tokens:
            self._last = time.perf_counter()
            if not self._num_tokens:
                self._first = self._last
            self._num_tokens = num_tokens

    def context_note(self, max_model_len: int) -> str | None:
        """What to say where prompt and text fill the context, in tokens; None where there is room left."""
        if self._num_prompt_tokens + self._num_tokens < max_model_len:
            return None
        return (
            f"the context is full: prompt and text have {self._num_prompt_tokens} + {self._num_tokens} "
            f"tokens, and it holds {max_model_len} (--max-model-len)"
        )

    def __str__(self) -> str:
        """`120 prompt tokens, 340 tok/s · first token after 0.35 s · 100 tokens, 25.3 tok/s`.

        A speed needs enough tokens to be one: of a few, a step's own time would be told as if it were theirs.
        """
        if not self._num_tokens:
            return f"{_counted(self._num_prompt_tokens, 'prompt token')} · no token written"
        ttft, writing = self._first - self._started, self._last - self._first
        prompt = _counted(self._num_prompt_tokens, "prompt token")
        if self._num_prompt_tokens >= MIN_PROMPT and ttft:
            prompt += f", {self._num_prompt_tokens / ttft:.0f} tok/s"
        written = _counted(self._num_tokens, "token")
        if self._num_tokens >= MIN_WRITTEN and writing:
            written += f", {(self._num_tokens - 1) / writing:.1f} tok/s"
        return f"{prompt} · first token after {ttft:.2f} s · {written}"


def _counted(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
