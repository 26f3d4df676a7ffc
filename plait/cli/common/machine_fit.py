"""Whether a model fits into this machine: what `plait info` says first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.cli.common.format_model import bytes_text
from plait.config import EngineConfig
from plait.errors import ConfigError, OutOfMemory

if TYPE_CHECKING:
    from plait.loading.open_model import Opened
    from plait.memory import State

Facts = dict[str, Any]
USERS = (1, 4, 16, 64)


def fit_facts(opened: Opened, states: Mapping[str, State], dtype: str, config: EngineConfig) -> Facts:
    """Memory of the model here, in bytes, and what computes it. Nothing is loaded.

    `users`: weights and the state of so many sequences of `context` tokens. `why_not`: None if it fits.
    """
    from plait.engine.device import choose_device, free_memory, total_memory
    from plait.engine.memory_plan import ModelFacts, sequence_nbytes, size_state

    spec, weights = opened.resolved.spec, opened.nbytes
    device, _ = choose_device(config.device)
    free = free_memory(device)
    facts: Facts = {"device": device.type, "free": free, "weights": weights, "why_not": None}
    model = ModelFacts(states=states, max_len=spec.max_len, dtype=dtype, causal=spec.causal)
    context = min(config.max_model_len or spec.max_len, spec.max_len)
    if weights > free:
        facts["why_not"] = f"the weights take {bytes_text(weights)}"
    else:
        try:
            sizing = size_state(model, config, free_memory=free - weights, total_memory=total_memory(device))
            context = sizing.max_model_len
            facts["reserved"] = sizing.nbytes
        except (ConfigError, OutOfMemory) as error:
            facts["why_not"] = str(error)
    each = sequence_nbytes(states, dtype, context, config.block_size)
    counts = sorted({*(n for n in USERS if n < config.max_num_seqs), config.max_num_seqs})
    users = [{"users": n, "nbytes": weights + n * each} for n in counts]
    return {**facts, "context": context, "users": users, "kernels": kernels(device.type, config)}


def kernels(device: str, config: EngineConfig) -> str:
    """What computes the model on this device, from static facts."""
    from plait.kernels.load import describe_target

    if device != "cpu":
        return "torch, and Triton for packed weights where it is installed"
    target = describe_target(isa=config.isa)
    if target is None:
        return "torch alone, many times slower: Numba is not installed"
    return f"native, compiled for {target.name}"


def fit_lines(facts: Facts) -> list[str]:
    """The first lines of `plait info`: whether it fits, memory by users, kernels."""
    free, device = bytes_text(facts["free"]), facts["device"]
    verdict = f"no: {facts['why_not']}" if facts["why_not"] else "yes"
    rows = ", ".join(f"{row['users']}: {bytes_text(row['nbytes'])}" for row in facts["users"])
    return [
        f"  fits: {verdict}; {free} are free on the {device}",
        f"  memory with so many users of {facts['context']:,} tokens each: {rows}",
        f"  kernels: {facts['kernels']}; --ops loads the model and shows each",
    ]
