"""OpenVINO GenAI's pipeline, which reads GGUF files and folders of its own; timed by its own metrics."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

ANY = 2**63 - 1  # tokens of one pass, as many as there are


class OpenVinoSide:
    """An `LLMPipeline` on the CPU. Prompts of one batch must be equally long."""

    def __init__(self, model: str, threads: int | None, *, options: dict[str, object], **_: int) -> None:
        self.numpy: Any = import_module("numpy")
        self.ov: Any = import_module("openvino")
        self.genai: Any = import_module("openvino_genai")
        limits = {"INFERENCE_NUM_THREADS": threads} if threads else {}
        given = {"scheduler_config": self._schedule(), **limits, **options}
        self.pipe = self.genai.LLMPipeline(model, "CPU", **given)
        self.facts: dict[str, object] = {
            "engine": "openvino",
            "version": f"openvino-genai {self.genai.__version__}",
            "threads": threads,
        }

    def close(self) -> None:
        self.pipe = None

    def _schedule(self) -> Any:
        """Its default without the cache of prefixes: what begins like a prompt before it would be free."""
        config = self.genai.SchedulerConfig()
        config.enable_prefix_caching = False
        config.max_num_batched_tokens = ANY
        return config

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds to the first token, seconds from there)."""
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        ids = self.numpy.array(prompts, self.numpy.int64)
        inputs = self.genai.TokenizedInputs(self.ov.Tensor(ids), self.ov.Tensor(self.numpy.ones_like(ids)))
        started = time.perf_counter()
        result = self.pipe.generate(inputs, config)
        seconds = time.perf_counter() - started
        first = min(seconds, result.perf_metrics.get_ttft().mean / 1000) if tokens > 1 else seconds
        return [list(map(int, row)) for row in result.tokens], first, seconds - first
