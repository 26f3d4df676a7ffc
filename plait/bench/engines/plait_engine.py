"""Plait itself, of this or another revision: the runner alone, and through `LLM`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from plait import SamplingParams
    from plait.config import EngineConfig
    from plait.schedule.plan import SamplingBatch, StepPlan, Ticket

T = TypeVar("T")


class Timed:
    """A runner that records how long each step took: (tokens, sequences, seconds)."""

    def __init__(self, runner: object) -> None:
        self._runner, self.steps = runner, []  # type: Any, list[tuple[int, int, float]]

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
        self.steps.append((plan.num_tokens, len(plan.chunks), time.perf_counter() - started))
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


class PlaitSide:
    """`options`: fields of EngineConfig. Level "runner" steps the loaded runner from this thread."""

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
        from plait.errors import ConfigError

        given = choose_image({"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, **options})
        if threads:
            given["threads"] = threads
        self.llm = LLM(model, **given)
        if self.llm.front.spec.canvas is not None:
            self.llm.close()
            raise ConfigError(f"{model} writes no single tokens to be timed; use `plait bench serve`")
        self._loaded = cast(Any, self.llm._loaded)
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
        if level == "runner":
            return sum(seconds for _, _, seconds in self._steps([ids], 1))
        return self._stream(ids, 1)[0]

    def decode(self, ids: list[int], tokens: int, level: str) -> float:
        if level == "runner":
            return sum(seconds for _, _, seconds in self._steps([ids], tokens + 1)[-tokens:])
        return self._stream(ids, tokens + 1)[1]

    def batch(self, prompts: list[list[int]], tokens: int, level: str) -> dict[str, float]:
        started, count = time.perf_counter(), len(prompts)
        if level != "runner":
            made = sum(len(ids) for ids in self.greedy(prompts, tokens))
            return {"seconds": time.perf_counter() - started, "tokens": made}
        steps = self._steps(prompts, tokens)
        seconds = time.perf_counter() - started
        full = [took for rows, seqs, took in steps if rows == seqs == count]
        return {
            "seconds": seconds,
            "tokens": count * tokens,
            "decode_seconds": sum(full),
            "decode_tokens": count * len(full),
        }

    def close(self) -> None:
        self.llm.close()

    def _params(self, tokens: int) -> SamplingParams:
        from plait import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, repetition_penalty=1.0)

    def _steps(self, prompts: list[list[int]], tokens: int) -> list[tuple[int, int, float]]:
        """Run prompts to their end on an engine of our own, over the loaded runner and its memory."""
        from plait.engine.core import Engine

        loaded, failed = self._loaded, []
        spec, runner = loaded.front.spec, Timed(loaded.runner)
        scheduler = loaded.sizing.scheduler(loaded.config, causal=spec.causal)
        length = loaded.front.max_model_len
        engine = Engine(runner, scheduler, vocab_size=spec.vocab_size, max_model_len=length)
        for ids in prompts:
            request = loaded.front.prepare(ids, self._params(tokens))
            engine.submit(request, lambda event: failed.append(event.error) if event.error else None)
        while engine.step():
            pass
        if failed:
            raise failed[0]
        return runner.steps

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
