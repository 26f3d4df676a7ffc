"""Where and how a model is built: device, dtype, kernels and threads, chosen once from its options."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from plait import resource_limits
from plait.checkpoint.weights import Target
from plait.engine.device import choose_dtype
from plait.kernels.load import executor, load_for_gpu, load_kernels, why_no_amx
from plait.loading.open_model import Opened, activations, kv_dtype, linear_dtypes, stored_dtypes
from plait.ops.chip import Chip, read_chip
from plait.ops.registry import check_fused
from plait.runner.graph_backends import CudaGraphs, TorchGraphs

log = logging.getLogger("plait")


def make_target(
    opened: Opened, device: torch.device, example: Chip | None = None, *, is_interpreted: bool = False
) -> Target:
    """What a model is built for. `example`: a GPU that is made up, with its tensors on the CPU `device`.

    `is_interpreted`: its kernels will run there. Raises ConfigError for options that cannot be honoured.
    """
    spec, config = opened.resolved.spec, opened.config
    chip = example or read_chip(device)
    dtype = choose_dtype(config.dtype, chip, linear_dtypes(opened))
    if is_interpreted:
        dtype = torch.float32  # Triton's interpreter computes in bfloat16 what no GPU does
    length = min(config.max_model_len or spec.max_len, spec.max_len)
    target = Target(device, dtype, length, spec.hidden_size, config.ops, block_size=config.block_size)
    check_fused(config.no_fuse)
    target.quantize, target.no_fuse, target.chip = config.quantize, config.no_fuse, chip
    target.deterministic = config.deterministic
    target.kv_dtype = kv_dtype(config, stored_dtypes(opened), dtype)
    if chip is not None:
        load_for_gpu()
        if is_interpreted:
            target.graphs = TorchGraphs(chip)
        elif example is None:
            target.graphs = CudaGraphs(device, chip)
        return target
    threads, found = (config.threads, "--threads") if config.threads else resource_limits.default_threads()
    log.info("threads: %d (%s)", threads, found)
    if (quota := resource_limits.cpu_quota()) is not None and quota < threads:
        log.warning(
            "threads: %d share a CPU quota of %.3g: they are stopped in turns, and wait", threads, quota
        )
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    load_kernels(cache_dir=cache_dir, isa=config.isa)
    target.activations = activations(config)
    target.executor = None if config.ops == "reference" else executor(threads, config.prefill)
    if config.prefill == "bf16" and (why := why_no_amx()):
        log.warning("prefill: bf16 is not possible: %s; prompts are computed as replies are", why)
    # Native kernels have threads of their own: torch's would wait for work on the same cores.
    torch.set_num_threads(1 if target.executor else threads)
    return target
