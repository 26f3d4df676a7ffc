"""Where and how a model is built, chosen once from its options: device, dtype, kernels, threads, ranks."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from plait import resource_limits
from plait.checkpoint.divided import Cuts
from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.device import choose_dtype
from plait.errors import CannotDivide, ConfigError
from plait.kernels.load import executor, load_for_gpu, load_kernels, why_no_amx
from plait.loading.disk_cache import NO_DISK
from plait.loading.identity.fingerprint import COMPUTES, digest_model
from plait.loading.identity.source_code import hash_code
from plait.loading.kernel_trials.plan import OpKinds
from plait.loading.meta.meta_model import list_ops
from plait.loading.open_model import (
    Opened,
    activations,
    kv_dtype,
    linear_dtypes,
    stored_dtypes,
    weight_formats,
)
from plait.model.divide import count_shares, divide_model
from plait.ops.chip import Chip, read_chip
from plait.ops.expert_low_rank import add_expert_low_rank
from plait.ops.ranks import Alone
from plait.ops.registry import check_fused
from plait.ops.stacked_low_rank import add_stacked_low_rank
from plait.partition import Rank
from plait.quant.gguf import BLOCK_TYPES
from plait.runner.device.graph_backends import CudaGraphs, TorchGraphs
from plait.runner.ranks.group_comm import GroupComm
from plait.version import __version__

log = logging.getLogger("plait")
# Ops that sum over more than one row's own numbers, in an order that a library may choose by the batch.
MIXING = {
    *("linear", "paged_attention", "paged_latent_attention", "map_heads", "experts", "add_low_rank"),
    *("choose_keys", "sparse_latent_attention", "choose_blocks", "block_sparse_attention"),
    *("choose_entry_blocks", "choose_among_blocks"),
    *("choose_entries", "entry_attention", "front_attention", "add_stacked_low_rank", "add_expert_low_rank"),
}
# Of those for GPUs the ones in which a row's bits depend on that row alone, whatever shares the step.
APART = {
    *(("paged_attention", "triton"), ("paged_latent_attention", "triton")),
    *(("paged_latent_attention", "triton window"), ("sparse_latent_attention", "triton codes")),
    *(("choose_entries", "triton"), ("entry_attention", "triton"), ("front_attention", "triton front")),
    *(("linear", "one form"), ("map_heads", "one form"), ("experts", "one form")),
    *(("choose_keys", "triton"), ("sparse_latent_attention", "triton")),
    *(("choose_blocks", "triton"), ("block_sparse_attention", "triton")),
    *(("choose_entry_blocks", "triton"), ("choose_among_blocks", "triton")),
    *(("add_stacked_low_rank", "triton"), ("add_expert_low_rank", "triton")),
}


def make_target(
    opened: Opened,
    device: torch.device,
    example: Chip | None = None,
    *,
    is_interpreted: bool = False,
    cuts: Cuts | None = None,
) -> Target:
    """What a model is built for. `example`: a GPU that is made up, with its tensors on the CPU `device`.

    `is_interpreted`: its kernels will run there. `cuts`: this rank's part; None: the whole model. Raises
    ConfigError for options that cannot be honoured.
    """
    spec, config = opened.resolved.spec, opened.config
    chip = example or read_chip(device)
    dtype = choose_dtype(config.dtype, chip, linear_dtypes(opened))
    if is_interpreted:
        dtype = torch.float32  # Triton's interpreter computes in bfloat16 what no GPU does
    length = min(config.max_model_len or spec.max_len, spec.max_len)
    target = Target(device, dtype, length, spec.hidden_size, config.ops, block_size=config.block_size)
    target.cuts, target.merge_ids = cuts or Cuts(), opened.merge_ids
    check_fused(config.no_fuse)
    target.quantize, target.no_fuse, target.chip = config.quantize, config.no_fuse, chip
    target.deterministic, target.pdl = config.deterministic, config.pdl
    target.kv_dtype = kv_dtype(config, stored_dtypes(opened), dtype)
    check_kept(config, chip)
    target.state_dtype = config.state_dtype
    if chip is not None:
        load_for_gpu()
        if is_interpreted:
            target.graphs = TorchGraphs(chip)
        elif example is None:
            target.graphs = CudaGraphs(device, chip, target.comm.rank.size)
        return target
    threads, found = (config.threads, "--threads") if config.threads else resource_limits.default_threads()
    if (ranks := target.comm.rank.size) > 1 and not config.threads:
        threads, found = max(1, threads // ranks), f"{found}, divided among {ranks} ranks"
    log.info("threads: %d (%s)", threads, found)
    if too_many := resource_limits.describe_crowding(threads * target.comm.rank.size):
        log.warning("threads: %s", too_many)
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    load_kernels(cache_dir=cache_dir, isa=config.isa)
    target.activations = activations(config)
    target.executor = None if config.ops == "reference" else executor(threads, config.prefill)
    if config.prefill == "bf16" and (why := why_no_amx()):
        log.warning("prefill: bf16 is not possible: %s; prompts are computed as replies are", why)
    # Native kernels have threads of their own: torch's would wait for work on the same cores.
    torch.set_num_threads(1 if target.executor else threads)
    torch.tanh(torch.zeros(1))  # MKL sets its vector maths up here: several threads at once get it wrong
    return target


def find_used_ops(opened: Opened) -> OpKinds:
    """The ops that a model may bind on a GPU, and that trials are of, with their activations."""
    config = opened.config
    has_adapters = config.lora or config.lora_folder is not None
    found = list_ops(opened.resolved, opened.checkpoint)
    added = (add_stacked_low_rank.name, add_expert_low_rank.name) if has_adapters else ()
    return found | {name: set[str]() for name in added}


def take_verdicts(target: Target, chip: Chip | None) -> None:
    """Choose every kernel from now on by what trials found: those of the model, and those around its step."""
    target.chip = chip
    if target.graphs is not None:
        target.graphs.chip = chip


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for what no GPU does yet, before kernels are tried there and weights are loaded."""
    if device.type == "cpu":
        return
    if config.cache_disk is not None:
        raise ConfigError(NO_DISK)


def check_kept(config: EngineConfig, chip: Chip | None) -> None:
    """Raises ConfigError for what state is to be kept in, where kernels on a GPU do not read it."""
    if chip is None:
        return
    if config.state_dtype != "float32":
        raise ConfigError(
            f"state_dtype: {config.state_dtype} is for CPUs, and kernels on a GPU read float32; leave it out"
        )
    if config.kv_dtype in ("int7", "int4"):
        raise ConfigError(
            f"kv_dtype: {config.kv_dtype} is for CPUs; kernels on a GPU read float32, bfloat16 and int8"
        )


def choose_rank(opened: Opened) -> Rank:
    """Rank 0 of as many as the options say. Raises CannotDivide and ConfigError, before any weight is read.

    With `--deterministic` sums are divided into the model's own number of shares, on one rank, too.
    """
    config, spec = opened.config, opened.resolved.spec
    size, block = config.num_ranks, most_columns(opened)
    shares = 0
    if config.deterministic:
        shares = count_shares(spec, Rank(block=block, whole_experts=config.expert_parallel))
        if shares % size:
            raise CannotDivide(
                f"deterministic: the sums of this model have {shares} shares, so it runs on "
                f"{', '.join(str(n) for n in (1, 2, 4, 8) if shares % n == 0)} ranks, not on {size}"
            )
        if size > 1 and config.state_dtype != "float32":
            raise CannotDivide(
                f"deterministic: a rank rounds {config.state_dtype} states by its own rows, so {size} ranks "
                "have other bits than one; give --state-dtype float32, or leave --deterministic out"
            )
        shares = 0 if shares == 1 else shares
    rank = Rank(0, size, shares, block, config.expert_parallel)
    divided = divide_model(spec, rank)
    with suppress(CannotDivide):
        if config.expert_parallel and divided == divide_model(spec, replace(rank, whole_experts=False)):
            raise ConfigError("expert_parallel: this model has no experts to divide; leave it out")
    return rank


def find_cuts(opened: Opened, rank: Rank, meeting: str | None, device: torch.device) -> Cuts:
    """What this rank keeps. `meeting`: where it meets the others, if there are any."""
    spec = opened.resolved.spec
    if rank.num_shares == 1:
        return Cuts()
    comm = Alone(rank) if meeting is None else GroupComm(rank, meeting, device)
    return Cuts.for_rank(comm, lambda other: divide_model(spec, other)[1])


def most_columns(opened: Opened) -> int:
    """Columns of the largest block that a weight of the checkpoint has, 1 where all are plain."""
    blocks = {kind.name: kind.elements for kind in BLOCK_TYPES.values()}
    found = [1]
    for name in weight_formats(opened):
        group = name.rpartition("_g")[2] if "_g" in name else name.rpartition("_b")[2]
        found.append(blocks.get(name, int(group) if group.isdigit() else 1))
        found += [32] if name == "mxfp4" else [16] if name == "nvfp4" else []
    return max(found)


def config_of_ranks(config: EngineConfig) -> EngineConfig:
    """The options of ranks 1 and up: what rank 0 has probed is kept, and what it downloaded is there."""
    return replace(config, probe=False, offline=True)


def agreement_of(opened: Opened, rank: Rank) -> str:
    """A hash of what all ranks must have in common: code, model, files, options and how it is divided."""
    divided = (rank.size, rank.shares, rank.block, rank.whole_experts)
    parts = (__version__, hash_code(COMPUTES), digest_model(opened), divided)
    options = json.dumps(asdict(config_of_ranks(opened.config)), sort_keys=True)
    return hashlib.blake2b(f"{parts}{options}".encode(), digest_size=16).hexdigest()


def loose_ops(target: Target) -> dict[str, str]:
    """Ops with rounding that may depend on the batch, and the variant that was bound for each."""
    mixing = (b for b in target.bound if b.op in MIXING and not b.variant.startswith("native"))
    return {b.op: b.variant for b in mixing if (b.op, b.variant) not in APART}


def check_deterministic(target: Target) -> None:
    """Raises ConfigError if an op is bound to a variant with rounding that may depend on the batch."""
    if loose := loose_ops(target):
        shown = ", ".join(f"{op} ({variant})" for op, variant in sorted(loose.items()))
        where = target.chip.name if target.chip else target.device.type
        raise ConfigError(
            f"deterministic: on {where} this model runs {shown}, so rounding may change with the batch; "
            "leave the option out, or run on a CPU (--cpu) with native kernels and without --ops reference"
        )
