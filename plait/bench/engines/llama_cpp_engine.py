"""llama.cpp, through the C functions of llama-cpp-python: no sampling chain, no text, several sequences."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from typing import Any

PASS = 512  # tokens of one pass: llama.cpp's own default for what it computes at once


class LlamaCppSide:
    """One model; a context for one sequence, and one for as many as the last batch had."""

    def __init__(
        self,
        model: str,
        threads: int | None,
        max_model_len: int,
        max_num_seqs: int,
        options: dict[str, object],
    ) -> None:
        if not model.endswith(".gguf"):
            raise NotImplementedError("llama.cpp reads GGUF files; name one: llama.cpp=FILE.gguf")
        self.lib: Any = import_module("llama_cpp")
        self._quiet = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.lib.llama_backend_init()
        self.threads = threads or 1
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self.max_model_len = max_model_len
        self.sampler = self.lib.llama_sampler_init_greedy()
        self.contexts: dict[tuple[int, int], Any] = {}
        self._context(1, max_model_len)
        self.facts: dict[str, object] = {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {self.lib.__version__}",
            "threads": self.threads,
        }

    def close(self) -> None:
        for context in self.contexts.values():
            self.lib.llama_free(context)
        self.lib.llama_model_free(self.model)

    def _context(self, count: int, length: int) -> Any:
        """A context of `count` sequences of `length` tokens; of those for several, the last is kept."""
        length = self.max_model_len if count == 1 else -(-length // 256) * 256
        if (count, length) not in self.contexts:
            for other in [key for key in self.contexts if key[0] > 1]:
                self.lib.llama_free(self.contexts.pop(other))
            params = self.lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max = length * count, count
            params.n_batch = params.n_ubatch = PASS
            params.n_threads = params.n_threads_batch = self.threads
            context = self.lib.llama_init_from_model(self.model, params)
            if not context:
                raise ValueError(f"llama.cpp cannot make a context of {count} sequences of {length} tokens")
            self.contexts[count, length] = context
        return self.contexts[count, length]

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds to every first token, seconds from there)."""
        lib, context = self.lib, self._context(len(prompts), max(map(len, prompts)) + tokens)
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        batch = lib.llama_batch_init(PASS, 0, 1)
        try:
            started = time.perf_counter()
            last = self._prefill(context, batch, prompts)
            first = time.perf_counter()
            made = [[token] for token in last]
            for step in range(tokens - 1):
                rows = [
                    (out[-1], len(ids) + step, s, True)
                    for s, (ids, out) in enumerate(zip(prompts, made, strict=True))
                ]
                self._decode(context, batch, rows)
                for s, out in enumerate(made):
                    out.append(lib.llama_sampler_sample(self.sampler, context, s))
            return made, first - started, time.perf_counter() - first
        finally:
            lib.llama_batch_free(batch)

    def _prefill(self, context: object, batch: object, prompts: list[list[int]]) -> list[int]:
        """Whole prompts, as many to a pass as fit; the first new token of each."""
        rows = [
            (token, at, s, at == len(ids) - 1)
            for s, ids in enumerate(prompts)
            for at, token in enumerate(ids)
        ]
        found: list[int] = []
        for start in range(0, len(rows), PASS):
            part = rows[start : start + PASS]
            self._decode(context, batch, part)
            ends = [i for i, row in enumerate(part) if row[3]]
            found += [self.lib.llama_sampler_sample(self.sampler, context, i) for i in ends]
        return found

    def _decode(self, context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """One pass over rows of (token, position, sequence, whether its logits are needed)."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := self.lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
