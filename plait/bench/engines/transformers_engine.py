"""transformers, by its own forward pass and cache, in bfloat16; it decodes GGUF files while loading."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any


class TransformersSide:
    """A causal language model of transformers on the CPU. Prompts of one batch must be equally long."""

    def __init__(self, model: str, threads: int | None, *, options: dict[str, object], **_: int) -> None:
        self.torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        if threads:
            self.torch.set_num_threads(threads)
        path = Path(model)
        named = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        source = path.parent if named or path.is_file() else path
        dtype = getattr(self.torch, str(options.get("dtype", "bfloat16")))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **named).eval()
        self.facts: dict[str, object] = {
            "engine": "transformers",
            "version": f"{transformers.__version__}, torch {self.torch.__version__}",
            "threads": self.torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        self.model = None

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds to the first token, seconds from there)."""
        with self.torch.inference_mode():
            started = time.perf_counter()
            out = self.model(input_ids=self.torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            made = [out.logits[:, -1].argmax(-1)]
            made[0].tolist()
            first = time.perf_counter()
            for _ in range(tokens - 1):
                known = out.past_key_values
                out = self.model(input_ids=made[-1][:, None], past_key_values=known, use_cache=True)
                made.append(out.logits[:, -1].argmax(-1))
            ids = self.torch.stack(made, 1).tolist()
            return ids, first - started, time.perf_counter() - first
