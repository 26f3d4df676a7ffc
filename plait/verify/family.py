"""Check that a family is sound: what every family of Plait is tested for, on a small random model of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.common.registry import Family, families_by_name
from plait.kernels.load import executor
from plait.loading.build import Loaded, load
from plait.loading.plugins import Plugin, load_plugins
from plait.ops.registry import REGISTRY, Op, OpFacts, Variant
from plait.verify.results import VerifyReply
from plait.verify.tiny.models import write_model
from plait.verify.verify import Extent, Verification

BATCH, TOKENS = 3, 8
NEAR = 1e-3  # between log-probabilities of kernels and references, of a model of a few layers in float32


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was checked; `note`: what is wrong, or how much there was to see."""

    name: str
    is_right: bool
    note: str


def check_plugin(name: str, config: EngineConfig, keep: Path | None = None) -> Iterator[CheckResult]:
    """Check the family of that name, or what a plug-in of that name registers; each result as it is done.

    The kernels of the plug-in that a family comes from are checked first, however it was loaded.
    keep: a folder for the small model; of several families each has one of its own in it.
    Raises ConfigError, PluginError, and what loading the small models does.
    """
    plugins = load_plugins(config)
    if (entry := families_by_name().get(name)) is not None:
        families = {entry.name: entry}
        plugins = tuple(plugin for plugin in plugins if is_of(plugin, entry.build))
    else:
        config = replace(config, plugins=(*config.plugins, name))
        plugins = load_plugins(config)[-1:]
        named = families_by_name().values()
        families = {entry.name: entry for entry in named if is_of(plugins[0], entry.build)}
        if not families:
            raise ConfigError(f"--family {name}: the plug-in registers no family; decorate one with @family")
    for plugin in plugins[:1]:  # one that is installed may be named, too
        yield from check_ops(plugin)
    for entry in families.values():
        with TemporaryDirectory(prefix="plait-family-") as passing:
            kept = keep / entry.name if keep and len(families) > 1 else keep
            yield from check_family(entry, kept or Path(passing), config)


def is_of(plugin: Plugin, function: object) -> bool:
    """Whether a plug-in defines it, in any of its modules."""
    return f"{function.__module__}.".startswith(f"{plugin.module}.")


def check_family(entry: Family, folder: Path, config: EngineConfig) -> Iterator[CheckResult]:
    """Every check, as it is done; the small model is written into `folder`. Raises what loading does."""
    write_tiny_model(entry, folder)
    reference, native = (_replies(folder, replace(config, ops=ops)) for ops in ("reference", "auto"))
    yield CheckResult("the config and the tensors are read", True, f"{reference[1]} tensors in use")
    yield _compare_replies(native[0], reference[0])
    for storage in ("float32", "q8_0"):
        loaded = load(str(folder), replace(config, quantize=None if storage == "float32" else "q8_0"))
        try:
            made = Verification(loaded, batch=BATCH, max_tokens=TOKENS, extent=Extent(is_quick=True))
            if storage == "float32":
                yield CheckResult("how a step runs", True, loaded.runner.step_kind)
            for result in made.results():
                wrong, of = len(result.differences), f"{result.num_tokens} tokens"
                note = f"{wrong} replies of {result.num_replies} differ" if wrong else of
                yield CheckResult(f"{storage}: {result.cell}", not wrong, note)
        finally:
            loaded.front.close(drain=False)


def _replies(folder: Path, config: EngineConfig) -> tuple[Mapping[str, VerifyReply], int]:
    loaded: Loaded = load(str(folder), config)
    try:
        plain = Verification(loaded, batch=BATCH, max_tokens=TOKENS).plain
        return plain, sum(1 for _ in loaded.opened.checkpoint.names())
    finally:
        loaded.front.close(drain=False)


def _compare_replies(native: Mapping[str, VerifyReply], reference: Mapping[str, VerifyReply]) -> CheckResult:
    """Log-probabilities of what both generate, as far as they generate the same."""
    worst, count = 0.0, 0
    for name, reply in reference.items():
        other = native[name]
        for i, (one, two) in enumerate(zip(reply.logprobs, other.logprobs, strict=False)):
            worst, count = max(worst, abs(one.logprob - two.logprob), key=_size), count + 1
            if reply.token_ids[i] != other.token_ids[i]:
                break
    note = f"log-probabilities of {count} tokens, {worst:.2g} apart at most (allowed: {NEAR:g})"
    return CheckResult("kernels agree with the reference ops", count > 0 and worst <= NEAR, note)


def check_ops(plugin: Plugin) -> Iterator[CheckResult]:
    """Every CPU kernel that a plug-in registers, or that was made for an op of it (`@elementwise`), against
    the op's reference, on the op's own cases.
    """
    made = executor(2)
    try:
        for op in REGISTRY.values():
            for variant in op.variants:
                is_its = is_of(plugin, variant.fn) or is_of(plugin, op.reference)
                if is_its and variant.on == "cpu":
                    yield _check_variant(op, variant, made)
    finally:
        if made is not None:
            made.close()


def _check_variant(op: Op, variant: Variant, on: object) -> CheckResult:
    name, worst, count = f"op {op.name}: {variant.name}", 0.0, 0
    for case in op.cases:
        facts = OpFacts(variant.on, torch.float32, case, on)
        if op.make is None or variant.refusal(facts) is not None:
            continue
        torch.manual_seed(0)
        args, kwargs = op.make(case, torch.float32, variant.on)
        given = [a.clone() if isinstance(a, Tensor) else a for a in args]
        made = [op.reference(*args, **kwargs), variant.bind(on)(*given, **kwargs)]
        names = signature(op.reference).parameters
        # State is changed in place: it is compared, too, where it has one layout for all variants.
        states = [(a, b) for name, a, b in zip(names, args, given, strict=False) if name not in op.private]
        for want, got in [(made[0], made[1]), *states]:
            if isinstance(want, Tensor):
                off = (want.float() - got.float()).abs() / (1 + want.float().abs())
                worst = max(worst, off.max().item() if off.numel() else 0.0, key=_size)
        count += 1
    allowed = op.find_tolerance(variant, torch.float32)
    note = f"{count} cases, {worst:.2g} off at most (allowed: {allowed:g})"
    return CheckResult(name, count > 0 and worst <= allowed, note)


def _size(number: float) -> float:
    """The size of a difference; a NaN is the largest."""
    return math.inf if math.isnan(number) else number


def write_tiny_model(entry: Family, folder: Path, seed: int = 0) -> None:
    """Write config.json and model.safetensors of the family's `tiny` config.

    Raises ConfigError for a family without one, and UnsupportedFormat where a recipe has no way back.
    """
    if not entry.tiny:
        raise ConfigError(
            f"family {entry.name}: it has no config of a small model; give @family(…, tiny={{…}}) one"
        )
    named = {"model_type": entry.model_types[0]} if entry.model_types else {}
    config: dict[str, object] = {"architectures": [entry.architectures[0]], **named, **entry.tiny}
    write_model(config, folder, seed)
