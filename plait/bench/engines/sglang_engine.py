"""SGLang, by `Engine.generate`, timed by the moments at which its stream brings tokens."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any


class SglangSide:
    """A model in bfloat16, without a cache of prefixes. Its scheduler is a process of its own, as always."""

    def __init__(
        self, model: str, threads: int | None, max_model_len: int, max_num_seqs: int, options: dict[str, Any]
    ) -> None:
        if not (Path(model) / "config.json").exists():
            raise NotImplementedError(
                "SGLang reads a folder of safetensors (`plait convert MODEL.gguf FOLDER -q bf16` makes one); "
                "name it: sglang=FOLDER"
            )
        os.environ["HF_HUB_OFFLINE"] = "1"
        sglang: Any = import_module("sglang")
        given = {"dtype": "bfloat16", "max_total_tokens": max_model_len * max_num_seqs, **options}
        self.llm = sglang.Engine(
            model_path=model,
            context_length=max_model_len,
            max_running_requests=max_num_seqs,
            skip_tokenizer_init=True,  # ids come and go
            disable_radix_cache=True,
            stream_interval=1,
            log_level="error",
            **given,
        )
        self.facts: dict[str, Any] = {
            "engine": "sglang",
            "version": sglang.__version__,
            "threads": threads,
            "dtype": given["dtype"],
        }

    def close(self) -> None:
        self.llm.shutdown()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds until every sequence has a token, seconds from there to the last)."""
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        found: list[list[int]] = [[] for _ in prompts]
        firsts: dict[int, float] = {}
        started = last = time.perf_counter()
        for event in self.llm.generate(input_ids=prompts, sampling_params=params, stream=True):
            last, row, ids = time.perf_counter(), event.get("index", 0), list(event["output_ids"])
            firsts.setdefault(row, last)
            # By version and option an event has all tokens so far, or those since the last one.
            is_whole = len(ids) == event["meta_info"]["completion_tokens"]
            found[row] = ids if is_whole else found[row] + ids
        first = max(firsts.values())
        return found, first - started, max(last - first, 1e-9)
