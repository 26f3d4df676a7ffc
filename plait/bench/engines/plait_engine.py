"""Plait itself, of this or another revision: the runner alone, and through `LLM`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from plait import SamplingParams
    from plait.config import EngineConfig
    from plait.request import Event
    from plait.schedule.plan import SamplingBatch, StepPlan, Ticket
    from plait.spec.canvas import AnyCanvas

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """`writes`: it computed logits for a token to write, not only a part of a prompt."""

    tokens: int
    sequences: int
    writes: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedRun:
    """`written`: (how many steps had run, of which request, how many new tokens)."""

    steps: list[TimedStep]
    written: list[tuple[int, str, int]]

    def behind_first(self, count: int) -> tuple[float, int, int]:
        """(seconds, tokens written, steps) from when each of `count` requests had written some."""
        seen, begun = set[str](), 0
        for num_steps, request, _ in self.written:
            if request not in seen:
                seen.add(request)
                begun = num_steps
            if len(seen) == count:
                break
        made = sum(num_tokens for num_steps, _, num_tokens in self.written if num_steps > begun)
        behind = self.steps[begun:]
        return sum(step.seconds for step in behind), made, len(behind)


class Timed:
    """A runner that records how long each step took."""

    def __init__(self, runner: object) -> None:
        self._runner, self.steps = runner, []  # type: Any, list[TimedStep]

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Run a step. Its ticket is done, so that the time of a step is its own."""
        from plait.schedule.plan import Done

        return Done(self._time(plan, lambda: self._runner.launch(plan, sampling).wait()))

    def execute(self, plan: StepPlan, sampling: SamplingBatch) -> object:
        """Run a step of a revision that had no tickets."""
        return self._time(plan, lambda: self._runner.execute(plan, sampling))

    def _time(self, plan: StepPlan, run: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - started
        writes = any(chunk.num_logits for chunk in plan.chunks)
        self.steps.append(TimedStep(plan.num_tokens, len(plan.chunks), writes, seconds))
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


class PlaitSide:
    """`options`: fields of EngineConfig. Level "runner" steps the loaded runner from this thread.

    A model that fills canvases writes several tokens in several passes, the first of them in the step of its
    prompt's end. So a decode is timed behind its first canvas. `observed`: how many tokens a pass wrote.
    """

    def __init__(
        self,
        model: str,
        threads: int | None,
        max_model_len: int,
        max_num_seqs: int,
        options: dict[str, object],
    ) -> None:
        import plait
        from plait import LLM

        given = choose_image({"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, **options})
        if threads:
            given["threads"] = threads
        self.llm = LLM(model, **given)
        self._loaded = cast(Any, self.llm._loaded)
        self._canvas = find_canvas(self._loaded)
        self._num_passes, self._num_written, self.observed = 0, 0, {}  # type: int, int, dict[str, float]
        self.facts: dict[str, object] = {
            "engine": "plait",
            "version": plait.__version__,
            "max_model_len": self.llm.front.max_model_len,
            "startup_image": describe_image(model, self._loaded.config, hasattr(self._loaded, "part")),
            **describe_loaded(self._loaded),
        }

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        outputs = self.llm.generate(prompts, self._params(tokens))
        return [list(out.outputs[0].token_ids) for out in outputs]

    def gaps(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[float]]:
        """By how much the largest logit is above that of each output token, given what is before it."""
        found = []
        for ids, out in zip(prompts, outputs, strict=True):
            logits = self.llm.logits([*ids, *out])[len(ids) - 1 : -1]
            chosen = logits[range(len(out)), out]
            found.append((logits.amax(-1) - chosen).tolist())
        return found

    def prefill(self, ids: list[int], level: str) -> float:
        if level != "runner":
            return self._stream(ids, self._canvas.size if self._canvas else 1)[0]
        steps = self._run([ids], 1).steps
        first = next(i for i, step in enumerate(steps) if step.writes)
        return sum(step.seconds for step in steps[: first + 1])

    def decode(self, ids: list[int], tokens: int, level: str) -> float:
        if level != "runner":
            return self._stream(ids, tokens + 1)[1]
        if not self._canvas:
            return sum(step.seconds for step in self._run([ids], tokens + 1).steps[-tokens:])
        seconds, made, passes = self._run([ids], tokens + self._canvas.size).behind_first(1)
        self._num_passes, self._num_written = self._num_passes + passes, self._num_written + made
        self.observed = {"tokens_per_pass": round(self._num_written / self._num_passes, 2)}
        return seconds * tokens / made

    def batch(self, prompts: list[list[int]], tokens: int, level: str) -> dict[str, float]:
        started, count = time.perf_counter(), len(prompts)
        if level != "runner":
            made = sum(len(ids) for ids in self.greedy(prompts, tokens))
            return {"seconds": time.perf_counter() - started, "tokens": made}
        run = self._run(prompts, tokens + (self._canvas.size if self._canvas else 0))
        seconds = time.perf_counter() - started
        if self._canvas:
            decode_seconds, made, _ = run.behind_first(count)
        else:
            full = [step.seconds for step in run.steps if step.tokens == step.sequences == count]
            decode_seconds, made = sum(full), count * len(full)
        return {
            "seconds": seconds,
            "tokens": sum(num_tokens for _, _, num_tokens in run.written),
            "decode_seconds": decode_seconds,
            "decode_tokens": made,
        }

    def close(self) -> None:
        self.llm.close()

    def _params(self, tokens: int) -> SamplingParams:
        from plait import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            repetition_penalty=1.0,
            seed=0,  # some canvases begin with noise
        )

    def _run(self, prompts: list[list[int]], tokens: int) -> TimedRun:
        """Run prompts to their end on an engine of our own, over the loaded runner and its memory."""
        from plait.engine.core import Engine

        loaded, failed, written = self._loaded, [], list[tuple[int, str, int]]()
        spec, runner = loaded.front.spec, Timed(loaded.runner)

        def note(event: Event) -> None:
            if event.error:
                failed.append(event.error)
            if event.token_ids:
                written.append((len(runner.steps), event.request_id, len(event.token_ids)))

        canvas = {"canvas": self._canvas} if self._canvas else {}  # some revisions do not take it
        scheduler = loaded.sizing.scheduler(loaded.config, causal=spec.causal, **canvas)
        length = loaded.front.max_model_len
        engine = Engine(runner, scheduler, vocab_size=spec.vocab_size, max_model_len=length)
        for ids in prompts:
            request = loaded.front.prepare(ids, self._params(tokens))
            engine.submit(request, note)
        while engine.step():
            pass
        if failed:
            raise failed[0]
        return TimedRun(runner.steps, written)

    def _stream(self, ids: list[int], tokens: int) -> tuple[float, float]:
        """(seconds to the first token, seconds from there to the last)."""
        started, first, last, count = time.perf_counter(), 0.0, 0.0, 0
        for delta in self.llm.stream(ids, self._params(tokens)):
            if delta.error:
                raise delta.error
            if delta.num_tokens > count:
                count, last = delta.num_tokens, time.perf_counter()
                first = first or last
        return first - started, last - first


def find_canvas(loaded: Any) -> AnyCanvas | None:
    """What the model's texts are written on, as the options have it; some revisions know none."""
    if (canvas := getattr(loaded.front.spec, "canvas", None)) is None:
        return None
    from plait.loading.make_engine import choose_canvas

    return choose_canvas(canvas, loaded.config)


def choose_image(options: dict[str, Any]) -> dict[str, Any]:
    """`options`, without a startup image in a revision of which the images do not say what they run."""
    from plait.config import EngineConfig

    known = "startup_image" in {field.name for field in fields(EngineConfig)}
    return {**options, "startup_image": "off"} if known and not has_described_images() else options


def has_described_images() -> bool:
    """Whether this revision has startup images that say which ops they run."""
    try:
        from plait.loading.image.start import LoadedImage
    except ImportError:
        return False
    return "part" in LoadedImage.__annotations__  # a dataclass in some revisions, a Struct in others


def describe_image(model: str, config: EngineConfig, is_used: bool) -> str:
    """ "used", or "kept": the next startup finds one; else why there is none."""
    if is_used:
        return "used"
    if not has_described_images():
        return "this revision is measured without one"
    from plait.loading.image.lookup import why_no_image
    from plait.loading.image.start import find_image

    if why := why_no_image(config):
        return why
    return "kept" if find_image(model, config) else "none was kept, see the log"


def describe_loaded(loaded: Any) -> dict[str, object]:
    """Threads, weights and bound ops of a loaded model; of one from a startup image without torch."""
    if (part := getattr(loaded, "part", None)) is not None:
        threads, ops = loaded.runner.replay.program.threads.threads, dict(part.bound)
        return {"threads": threads, "weights_nbytes": part.weights_nbytes, "dtype": part.dtype, "ops": ops}
    import torch

    target, variants = loaded.target, dict[str, set[str]]()
    for row in target.bound:
        variants.setdefault(row.op, set()).add(row.variant)
    executor = getattr(target, "executor", None)
    return {
        "threads": getattr(executor, "threads", None) or torch.get_num_threads(),
        "weights_nbytes": target.weights_nbytes,
        "dtype": str(target.dtype).removeprefix("torch."),
        "ops": {name: "+".join(sorted(found)) for name, found in sorted(variants.items())},
    }
