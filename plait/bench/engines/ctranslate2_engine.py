"""CTranslate2, by its generator; it reads folders made by its converter (model.bin and a vocabulary)."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any


class CTranslate2Side:
    """A CTranslate2 generator on the CPU. The first token is timed by a run of its own."""

    def __init__(self, model: str, threads: int | None, *, options: dict[str, object], **_: int) -> None:
        folder = Path(model)
        if not (folder / "model.bin").exists():
            raise NotImplementedError(
                "CTranslate2 reads a folder with model.bin (ct2-transformers-converter makes one); "
                "name it: ctranslate2=FOLDER"
            )
        ct2: Any = import_module("ctranslate2")
        kind = options.get("compute_type", "int8_float32")
        self.generator = ct2.Generator(model, device="cpu", intra_threads=threads or 0, compute_type=kind)
        words = next(p for p in (folder / "vocabulary.json", folder / "vocabulary.txt") if p.exists())
        text = words.read_text(encoding="utf-8")
        self.words: list[str] = json.loads(text) if words.suffix == ".json" else text.splitlines()
        self.facts: dict[str, object] = {
            "engine": "ctranslate2",
            "version": f"{ct2.__version__}, {self.generator.compute_type}",
            "threads": threads,
        }

    def close(self) -> None:
        self.generator.unload_model()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds to the first token, which a run of its own takes, seconds from there)."""
        words = [[self.words[i] for i in ids] for ids in prompts]
        first = self._generate(words, 1)[1] if tokens > 1 else 0.0
        ids, seconds = self._generate(words, tokens)
        return ids, first or seconds, max(seconds - first, 1e-9) if first else 0.0

    def _generate(self, words: list[list[str]], tokens: int) -> tuple[list[list[int]], float]:
        started = time.perf_counter()
        results = self.generator.generate_batch(
            words, max_length=tokens, min_length=tokens, sampling_topk=1, include_prompt_in_result=False
        )
        return [list(r.sequences_ids[0]) for r in results], time.perf_counter() - started
