"""onnxruntime-genai, token by token; it reads folders with a genai_config.json."""

from __future__ import annotations

import json
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any


class OnnxRuntimeSide:
    """An onnxruntime-genai model on the CPU. Prompts of one batch must be equally long."""

    def __init__(self, model: str, threads: int | None, **_: object) -> None:
        folder = Path(model)
        if not (folder / "genai_config.json").exists():
            raise NotImplementedError(
                "onnxruntime-genai reads a folder with genai_config.json (its model builder makes one); "
                "name it: onnxruntime-genai=FOLDER"
            )
        self.og: Any = import_module("onnxruntime_genai")
        self._folder = tempfile.TemporaryDirectory(prefix="plait-bench-")
        self.model = self.og.Model(str(_with_threads(folder, Path(self._folder.name), threads)))
        self.facts: dict[str, object] = {
            "engine": "onnxruntime-genai",
            "version": self.og.__version__,
            "threads": threads,
        }

    def close(self) -> None:
        self.model = None
        self._folder.cleanup()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
        """(new ids, seconds to the first token, seconds from there)."""
        params = self.og.GeneratorParams(self.model)
        length = len(prompts[0]) + tokens
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        started = time.perf_counter()
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(prompts if len(prompts) > 1 else prompts[0])
        made: list[list[int]] = [[] for _ in prompts]
        first = started
        for step in range(tokens):
            generator.generate_next_token()
            for out, token in zip(made, generator.get_next_tokens(), strict=True):
                out.append(int(token))
            if step == 0:
                first = time.perf_counter()
        return made, first - started, time.perf_counter() - first


def _with_threads(folder: Path, target: Path, threads: int | None) -> Path:
    """A folder with the number of threads set: links to the big files, and a config of its own."""
    for path in folder.iterdir():
        if path.name != "genai_config.json":
            (target / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "genai_config.json").read_text())
    session = config["model"]["decoder"].setdefault("session_options", {})
    if threads:
        session["intra_op_num_threads"] = threads
    (target / "genai_config.json").write_text(json.dumps(config))
    return target
