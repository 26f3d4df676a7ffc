"""Builders of engines for engine processes: the model of digests, and ways to end it.

The model's name says what goes wrong when a token is computed: see `ENDS`. "…" loads without fault.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.config import EngineConfig
from plait.engine.fingerprint import NO_FINGERPRINT, Fingerprint
from plait.errors import BadFile, ConfigError, DeviceLost
from plait.loading.text_side import TextSource
from plait.schedule.plan import Chunk, SamplingBatch, StepPlan, Ticket
from plait.spec.model import ModelSpec, NormSpec
from plait.worker.child import BuiltEngine
from tests.engine.hash_model import VOCAB, HashModel, engine

BUILDER = f"{__name__}:build"
SETTINGS = EngineConfig(max_num_seqs=16, max_num_batched_tokens=64)
POISON, STALL, GARBAGE, LONG, WORDY, LOUD = 90, 91, 92, 93, 94, 95  # tokens
CONTEXT = 400
STEP_S = 0.002


class Mortal(HashModel):
    """Steps take a moment; some tokens in a plan end the process, or as good as that.

    `lost`: a file that the first engine to have run 30 steps makes, when its GPU is lost.
    """

    def __init__(self, lost: Path | None = None) -> None:
        super().__init__()
        self.lost, self.num_steps = lost, 0

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        time.sleep(STEP_S)
        self.num_steps += 1
        if self.lost is not None and self.num_steps > 30 and not self.lost.exists():
            self.lost.touch()
            raise DeviceLost("the GPU cuda:0 was lost in a step: CUDA error: unspecified launch failure")
        for chunk in plan.chunks:
            if chunk.start == 0:
                _suffer(chunk)
        return super().launch(plan, sampling)


def _suffer(chunk: Chunk) -> None:
    """Only prompts can hurt: the model says every token of its vocabulary now and then."""
    match chunk.token_ids[0]:
        case _ if chunk.token_ids[:2] == (POISON, POISON):
            os.kill(os.getpid(), signal.SIGSEGV)
        case _ if chunk.token_ids[:2] == (STALL, STALL):
            time.sleep(3600)
        case _ if chunk.token_ids[:2] == (GARBAGE, GARBAGE):
            os.write(int(sys.argv[2]), b"\x00\x00\x00\x03\xc1\xc1\xc1")
        case _ if chunk.token_ids[:2] == (WORDY, WORDY):
            logging.getLogger("plait.step").debug("a wordy step")
        case _ if chunk.token_ids[:2] == (LOUD, LOUD):
            for fd in (1, 2):
                os.write(fd, b"a line of a library\n" * 2_000)  # more than a pipe holds
        case _ if chunk.token_ids[:2] == (LONG, LONG):
            os.write(int(sys.argv[2]), b"\xff" * 64)


def compile_one(config: EngineConfig) -> None:
    """Make a kernel where `load_kernels` would keep it, and log whether it was compiled."""
    from plait.kernels import load
    from plait.kernels.cpu.codegen import target

    target.keep_in(Path(config.cache_dir or ""), load._lent[-1])
    from plait.kernels.cpu.codegen.kernel import kernel

    @kernel
    def nothing(frame: int, args: int, thread: int, threads: int) -> None: ...

    assert nothing.address
    logging.getLogger("plait.engine").warning("compiled: %s", nothing.compile_s > 0)


def build(
    model: str,
    config: EngineConfig,
    report: Callable[[str, int, int], None],
    on_source: Callable[[TextSource], None],
) -> BuiltEngine:
    """An engine without text. The model's name may be a fault of loading."""
    report("reading headers", 0, 1)
    on_source(TextSource(name=model, vocab_size=VOCAB, metadata={"tokenizer.odd": "\udcff"}))
    match model:
        case "bad option":
            raise ConfigError("vocab: there is no such vocabulary")
        case "bad file":
            raise BadFile("model.safetensors: the file ends early")
        case "no memory":
            raise MemoryError
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashed":
            os._exit(7)
        case "broken":
            raise ZeroDivisionError("a fault of ours")
        case "waits":
            time.sleep(3600)
        case "compiles":
            compile_one(config)
        case path if path.startswith("/") and os.path.exists(path):
            raise BadFile(f"{path}: it cannot be read any more")
    limits: dict[str, Any] = {"max_num_seqs": config.max_num_seqs, "max_waiting": config.max_waiting}
    lost = Path(config.cache_dir or "") / "lost" if model == "loses its GPU" else None
    made = engine(Mortal(lost), length=CONTEXT, blocks=1000, **limits)
    report("ready", 1, 1)
    spec = ModelSpec("hash", 8, VOCAB, (), NormSpec(), CONTEXT)
    return BuiltEngine(made, spec, lambda: None, _fingerprint(model, config))


def _fingerprint(model: str, config: EngineConfig) -> Fingerprint:
    """None but of a model with a file that stands for its weights."""
    if model != "may be replaced":
        return NO_FINGERPRINT
    return Fingerprint("model", "fp_1", (Path(config.cache_dir or "") / "weights").read_text())
