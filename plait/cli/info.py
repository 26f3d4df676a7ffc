"""`plait info`: what a model is, where every value came from, and how much memory a sequence needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.format_model import (
    bytes_text,
    gpu_kernels,
    head_text,
    kernels_text,
    plain,
)
from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    common_options,
    engine_options,
    engine_settings,
    json_option,
    model_option,
    to_json,
)
from plait.cli.common.probe_table import probe_model, probe_rows
from plait.cli.common.progress import LoadingBar
from plait.cli.model_facts.bound_ops import group_bindings, op_lines
from plait.cli.model_facts.drafts import draft_facts, draft_lines, variant_facts, variant_lines
from plait.cli.model_facts.parts import layer_facts, layer_lines, tensor_facts, tensors_text
from plait.cli.model_facts.ranks import rank_facts, rank_lines
from plait.cli.model_facts.tables import Facts, columns, make_heading
from plait.config import UNPROVEN, EngineConfig
from plait.errors import ConfigError, OutOfMemory
from plait.families.common.inside import note_unread

if TYPE_CHECKING:
    from plait.loading.open_model import Opened
    from plait.memory import State
    from plait.ops.chip import Chip
    from plait.text.tokenizers.tokenizer import Tokenizer


LENGTHS = (1024, 8192, 32768, 131072)  # tokens
USERS = (1, 4, 16, 64)


@click.command(cls=GroupedCommand)
@model_option()
@json_option()
@click.option("--ops", "show_ops", is_flag=True, help="load it, and show which variant runs each op, and why")
@click.option("--probe-text", metavar="FILE", help="--probe on this text, in a language that the model knows")
@engine_options(without=("ops",))
@common_options()
def info(model: str, as_json: bool, show_ops: bool, probe_text: str | None, **given: Any) -> None:
    """What a model is: layers, sources of every value, memory. Reads headers, not weights.

    With --probe it runs the model, also if that has been done before, and shows all that was tried.
    With --speculate it shows what drafts, too: a head, a draft model or the model's own head.
    With --ops and --device cuda:sm_90 (or 75, 80, 89, 120) it shows what such a GPU would run, without one.
    """
    config = EngineConfig(**engine_settings({**given, "ops": "auto"}))
    facts = model_facts(model, replace(config, probe=config.probe or probe_text is not None), probe_text)
    if show_ops and find_example(config) is not None:
        facts |= example_facts(model, replace(config, probe=False))
    elif show_ops:
        facts |= load_bindings(model, replace(config, probe=False))
    lines = [to_json(facts)] if as_json else text_lines(facts)
    sys.stdout.write("\n".join(lines) + "\n")


def model_facts(model: str, config: EngineConfig, probe_text: str | None = None) -> Facts:
    """Everything `info` says, as plain values. Raises CheckpointError, UnsupportedModel."""
    from plait.engine.device import choose_dtype
    from plait.loading.draft_model import has_mtp
    from plait.loading.meta.meta_model import model_states
    from plait.loading.open_model import kv_dtype, linear_dtypes, open_model, stored_dtypes
    from plait.ops.rope import rope_notes

    opened, tried = (
        probe_model(model, config, probe_text) if config.probe else (open_model(model, config), None)
    )
    resolved, spec, config = opened.resolved, opened.resolved.spec, opened.config
    tokenizer, chip = opened.tokenizer(), chip_of(config)
    chosen = choose_dtype(config.dtype, chip, linear_dtypes(opened))
    dtype, kept = str(chosen).removeprefix("torch."), kv_dtype(config, stored_dtypes(opened), chosen)
    states = model_states(resolved, opened.checkpoint, kept, config.state_dtype)
    fit = fit_facts(opened, states, dtype, config)
    return {
        "model": model,
        "family": resolved.family,
        "fit": fit,
        "checkpoint": checkpoint_facts(opened),
        "spec": plain(spec),
        "layers": layer_facts(spec),
        "mtp": head_text(spec.mtp) if spec.mtp and has_mtp(opened) else None,
        "drafts": draft_facts(opened, tokenizer, chip, fit["context"]),
        "sources": {
            key: {"value": plain(value), "source": resolved.provenance.get(key, "?")}
            for key, value in resolved.config.items()
            if key in resolved.provenance
        },
        "notes": [
            *([str(spec.canvas)] if spec.canvas else []),
            *note_unread(resolved.names, opened.checkpoint.names()),
            *rope_notes(spec, min(config.max_model_len or spec.max_len, spec.max_len)),
        ],
        "tokenizer": tokenizer_facts(tokenizer),
        "memory": {
            **memory_facts(states, dtype, config, spec.max_len),
            "kv_dtype": dtype if kept == "model" else kept,
            "state_dtype": config.state_dtype,
        },
        **({"probe": tried} if config.probe else {}),
        **({"ranks": rank_facts(opened, chosen)} if config.num_ranks > 1 else {}),
    }


def checkpoint_facts(opened: Opened) -> Facts:
    return {
        "kind": opened.files.kind,
        "files": [str(path) for path in opened.files.weights],
        **tensor_facts(opened, opened.tensors),
    }


def tokenizer_facts(tokenizer: Tokenizer | None) -> Facts | None:
    if tokenizer is None:
        return None
    ends = {i: tokenizer.token_text(i) for i in sorted(tokenizer.eos_token_ids)}
    return {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "end_of_generation": ends}


def memory_facts(states: Mapping[str, State], dtype: str, config: EngineConfig, max_len: int) -> Facts:
    """Bytes of state of one sequence, by its length."""
    from plait.engine.memory_plan import sequence_rows

    lengths = [n for n in LENGTHS if n < max_len] + [max_len]
    rows = sequence_rows(states, dtype, config.block_size, lengths)
    return {"dtype": dtype, "sequence": [{"tokens": n, "nbytes": nbytes} for n, nbytes in rows]}


def load_bindings(model: str, config: EngineConfig) -> Facts:
    """Load the model: which variant of each op it bound, and what drafts, and why not a faster one."""
    from plait.loading.build import load

    with LoadingBar(f"loading {model}") as loading:
        loaded = load(model, config, loading.update)
    try:
        chip, drafts = loaded.target.chip, loaded.target.drafts
        return {
            "ops": group_bindings(loaded.target.bound),
            "kernels": gpu_verdict(chip, config) if chip else kernel_verdict(config),
            **({"draft_ops": variant_facts(drafts)} if drafts else {}),
        }
    finally:
        loaded.front.close()


def gpu_verdict(chip: Chip, config: EngineConfig) -> str:
    """What is known of the kernels that this GPU runs."""
    from plait.loading.kernel_trials.trials import describe_launches

    bad = sum(map(bool, chip.trials.values()))
    tried = f"{len(chip.trials)} kernels were tried on {chip.name}, and {bad} of them are not used"
    return f"{tried}; they are {describe_launches(chip, pdl=config.pdl)}; {UNPROVEN}"


def find_example(config: EngineConfig) -> Chip | None:
    """The GPU that is made up, if `device` names one: cuda:sm_90."""
    from plait.ops.chip import example_chip

    return example_chip(config.device)


def chip_of(config: EngineConfig) -> Chip | None:
    """The GPU that a model would run on, real or made up; None: the CPU. Raises ConfigError."""
    from plait.engine.device import choose_device
    from plait.ops.chip import read_chip

    return find_example(config) or read_chip(choose_device(config.device)[0])


def example_facts(model: str, config: EngineConfig) -> Facts:
    """The bindings and the launches of a step on a GPU that is made up."""
    from plait.loading.example_gpu import try_example

    chip = find_example(config)
    assert chip is not None
    with LoadingBar(f"loading {model}") as loading:
        found = try_example(model, config, chip, loading.update)
    step = {
        "chip": chip.name,
        "kind": found.kind,
        "sequences": found.num_seqs,
        "launches": sum(found.launches.values()),
        "kernels": dict(sorted(found.launches.items(), key=lambda item: (-item[1], item[0]))),
        "faults": dict(found.faults),
        "no_step": found.no_step,
    }
    kernels = f"what {chip.name} would run: {gpu_kernels()}"
    drafts = {"draft_ops": variant_facts(found.drafts)} if found.drafts else {}
    return {"ops": group_bindings(found.bindings), "kernels": kernels, "step": step, **drafts}


def step_lines(step: Facts) -> list[str]:
    """The launches of a step by kernel, and what prevents its capture as one graph."""
    if step["no_step"]:
        return [f"  none: {step['no_step']}"]
    rows = [(name, f"× {count}") for name, count in step["kernels"].items()]
    faults = [f"  not capturable: {why} (× {count})" for why, count in step["faults"].items()]
    num = len(faults)
    prevent = "1 place prevents one graph" if num == 1 else f"{num} places prevent one graph"
    graph = prevent if faults else "it can be captured as one graph"
    return [f"  {step['launches']} launches; {graph}", *columns(rows), *faults]


def kernel_verdict(config: EngineConfig) -> str:
    """What native kernels are compiled for here, or why there are none; after a model was loaded."""
    from plait.kernels.load import describe_target, why_no_kernels

    made_for = describe_target(isa=config.isa)
    if (why := why_no_kernels()) or made_for is None:
        return f"no native kernels: {why}"
    return f"native kernels are compiled for {made_for.name}" + (
        ", and those that were tried first gave what is known" if made_for.tried else ""
    )


def text_lines(facts: Facts) -> list[str]:
    """The facts for a reader in a terminal."""
    spec = facts["spec"]
    lines = [
        make_heading(f"{facts['model']}: {facts['family']}"),
        *fit_lines(facts["fit"]),
        *size_lines(facts),
    ]
    lines += ["", make_heading(f"layers ({len(spec['layers'])})")]
    lines += layer_lines(facts["layers"])
    if drafts := facts["drafts"]:
        lines += ["", make_heading("drafts (--speculate)"), *draft_lines(drafts)]
    elif head := facts["mtp"]:
        lines += ["", make_heading("head for multi-token prediction (--speculate mtp)")]
        lines += [f"  {branch}" for branch in head]
    lines += ["", make_heading("values and their sources"), *source_lines(facts["sources"])]
    if "probe" in facts:
        lines += ["", make_heading("probe"), *probe_lines(facts["probe"])]
    memory = facts["memory"]
    kept = memory["kv_dtype"]
    of = memory["dtype"] if kept == memory["dtype"] else f"{memory['dtype']}, keys and values {kept}"
    of += "" if memory["state_dtype"] == "float32" else f", recurrent state {memory['state_dtype']}"
    lines += ["", make_heading(f"state of one sequence ({of})")]
    lines += columns(
        [(f"{row['tokens']:>8,} tokens", bytes_text(row["nbytes"])) for row in memory["sequence"]]
    )
    if "ranks" in facts:
        count = len(facts["ranks"]["ranks"])
        lines += ["", make_heading(f"on {count} ranks"), *rank_lines(facts["ranks"])]
    if "ops" in facts:
        lines += ["", make_heading("ops"), *op_lines(facts["ops"]), f"  {facts['kernels']}"]
    if "draft_ops" in facts:
        lines += variant_lines(facts["draft_ops"])
    if step := facts.get("step"):
        what = f"a {step['kind']} of {step['sequences']} sequences on {step['chip']}"
        lines += ["", make_heading(what), *step_lines(step)]
    return lines


def probe_lines(tried: Facts | None) -> list[str]:
    """What was tried, and how well the model knows the text with what was chosen."""
    if tried is None:
        return ["  nothing is open: the files say all that can be tried"]
    return [*columns(probe_rows(tried)), f"  {tried['verdict']}"]


def size_lines(facts: Facts) -> list[str]:
    spec, files, tokenizer = facts["spec"], facts["checkpoint"], facts["tokenizer"]
    tied = ", tied embeddings" if spec["tied"] else ""
    sizes = f"hidden size {spec['hidden_size']}, vocabulary {spec['vocab_size']}, context {spec['max_len']}"
    return [
        f"  {tensors_text(files, files['kind'])}",
        f"  {sizes}{tied}",
        f"  tokenizer: {tokenizer['name'] if tokenizer else 'none found; token ids only, or --vocab'}",
        *(f"  {note}" for note in facts["notes"]),
    ]


def source_lines(sources: Mapping[str, Facts]) -> list[str]:
    rows = [(key, shorten(entry["value"]), entry["source"]) for key, entry in sources.items()]
    return columns(rows)


def shorten(value: object, limit: int = 28) -> str:
    """A value in one short line, with a sign of what is cut."""
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    if len(text) <= limit:
        return text
    return f"[… {len(value)} values]" if isinstance(value, list) else text[: limit - 1] + "…"


def fit_facts(opened: Opened, states: Mapping[str, State], dtype: str, config: EngineConfig) -> Facts:
    """Memory of the model here, in bytes, and what computes it. Nothing is loaded.

    `users`: weights and the state of so many sequences of `context` tokens. `why_not`: None if it fits.
    """
    import torch

    from plait.engine.device import free_memory
    from plait.engine.memory_plan import ModelFacts, sequence_nbytes, size_state

    spec, weights = opened.resolved.spec, opened.nbytes
    device, free, total = device_memory(config)
    facts: Facts = {"device": device, "free": free, "weights": weights, "why_not": None}
    tail = spec.canvas.tail if spec.canvas else 0
    model = ModelFacts(states=states, max_len=spec.max_len, dtype=dtype, causal=spec.causal, tail=tail)
    context = min(config.max_model_len or spec.max_len, spec.max_len)
    if weights > free:
        facts["why_not"] = f"the weights take {bytes_text(weights)}"
    else:
        try:
            host = None if device == "cpu" else free_memory(torch.device("cpu"))
            left = free - weights
            sizing = size_state(model, config, free_memory=left, free_host=host, total_memory=total)
            context = sizing.max_model_len
            facts["reserved"] = sizing.nbytes
        except (ConfigError, OutOfMemory) as error:
            facts["why_not"] = str(error)
    each = sequence_nbytes(states, dtype, context, config.block_size)
    counts = sorted({*(n for n in USERS if n < config.max_num_seqs), config.max_num_seqs})
    users = [{"users": n, "nbytes": weights + n * each} for n in counts]
    return {**facts, "context": context, "users": users, "kernels": kernels_text(device, config)}


def device_memory(config: EngineConfig) -> tuple[str, int, int | None]:
    """(type of the device, bytes that are free on it, bytes that it has); of an example, all are free."""
    from plait.engine.device import choose_device, free_memory, total_memory

    if chip := find_example(config):
        return "cuda", chip.memory_nbytes, chip.memory_nbytes
    device, _ = choose_device(config.device)
    return device.type, free_memory(device), total_memory(device)


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
