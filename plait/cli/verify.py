"""`plait verify`: whether a reply depends on anything but its request, checked on a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.certificate import run_cell, run_certificate
from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    common_options,
    engine_options,
    engine_settings,
    json_option,
    model_option,
    write_json,
)
from plait.cli.common.progress import LoadingBar, Status
from plait.cli.common.unread_flags import name_head, refuse_in_verify
from plait.cli.common.verify_effects import HAPPENED, NOTHING
from plait.cli.model_facts.tables import make_heading
from plait.config import EngineConfig
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.text.tokenizers.tokenizer import Tokenizer
    from plait.verify.ranks import RankCheck
    from plait.verify.results import Arithmetic, CellResult, Difference
    from plait.verify.verify import Extent, Verification

# What the matrix sets itself, or what no reply depends on.
OWN = (
    *("max_num_seqs", "max_num_batched_tokens", "max_waiting", "memory_limit", "max_step_ms"),
    *("prefix_cache", "snapshot_interval", "swap_memory", "speculate", "chat_template"),
    *("cache_disk", "cache_disk_limit", "cache_disk_bandwidth"),
)
NUM_TOGETHER = 3  # sequences of one choice: without so many, guidance and beams have no cells
OWN_SETTINGS: dict[str, object] = {
    **{name: EngineConfig.__dataclass_fields__[name].default for name in OWN},
    "max_num_seqs": NUM_TOGETHER,
    "prefix_cache": False,
}
TOKENS, QUICK_TOKENS = 24, 12  # of each reply
GRAPH_TOKENS, QUICK_GRAPH_TOKENS = 8, 3  # of a reply in Triton's interpreter, where a step takes a second
MOST_SHOWN = 5  # differences, where people read; --json has them all
NEAR = 1e-3  # between two logits: rounding in float32 may make either the larger


@click.command(cls=GroupedCommand)
@model_option(required=False)
@click.option(
    "--family",
    metavar="NAME|FILE.py",
    help="instead of a model: a small random one of this family, or of those that a plug-in registers, and "
    "the plug-in's kernels",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="with --family: write the small model into this folder, and leave it there",
)
@click.option("--batch", type=click.IntRange(2), default=4, show_default=True, help="most sequences at once")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"tokens of each reply [default: {TOKENS}, quick {QUICK_TOKENS}; with --graph {GRAPH_TOKENS}, quick "
    f"{QUICK_GRAPH_TOKENS}]",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="one prompt per line, as text or as [token, ids]; default: a few of Plait's own",
)
@click.option("--head", metavar="HEAD", help="a head in files of its own: it drafts in the ways with a head")
@click.option("--quick", is_flag=True, help="one way of each kind: a minute for a small model")
@click.option(
    "--graph",
    type=click.Choice(["torch"]),
    help="run a GPU's kernels and graphs on the CPU, in Triton's interpreter (TRITON_INTERPRET=1): for the "
    "smallest models, with short prompts",
)
@click.option(
    "--cell", metavar="NAME", help="one way alone: of the model, or MODEL/CELL/ROUND of a certificate"
)
@click.option(
    "--certificate",
    type=click.Path(path_type=Path, dir_okay=False),
    help="instead of a model: small random ones with every mixer, in every way, and write what comes of it "
    "into this file; a run that was interrupted goes on",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="with --certificate: of all replies together; whole rounds are run",
)
@click.option(
    "--add-missing",
    is_flag=True,
    help="with --certificate: keep the cells that other revisions of Plait made, and run what is missing",
)
@json_option()
@engine_options(without=OWN)
@common_options()
def verify(
    model: str | None,
    family: str | None,
    keep: Path | None,
    batch: int,
    max_tokens: int | None,
    prompts_file: Path | None,
    head: str | None,
    quick: bool,
    graph: str | None,
    cell: str | None,
    certificate: Path | None,
    tokens: int,
    add_missing: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Check that a reply depends on its request alone: same tokens, same bits.

    \b
    plait verify ./model --quick --head ./head --prompts prompts.txt
    plait verify --family my_hybrid.py
    plait verify ./model --tp 2 --deterministic
    plait verify --certificate certificate.json
    plait verify --cell mamba2/restarts-together/1

    The same requests, greedy and drawn with a seed, run under many settings: batches, prompts in chunks, the
    prefix cache, preemption by swap and by computing again, draft tokens, steps that fail. Each is compared
    token by token, and log-probability by log-probability, with a sequence that runs alone. If they differ,
    both run again op by op to find the first op that does. With --tp N the same requests run on one rank and
    on N instead. A certificate covers a million tokens of small models with every mixer. The exit code is 0
    if nothing differs that is promised.
    """
    if add_missing and (certificate is None or cell is not None):
        raise click.UsageError("--add-missing is about the file of --certificate; name one, and no --cell")
    config = EngineConfig(**engine_settings({**given, **OWN_SETTINGS, "speculate": name_head(head)}))
    made_up = None if model else family or certificate or cell
    refuse_in_verify(family, made_up, cell, has_ranks=config.num_ranks > 1)
    if family is not None:
        if model is not None:
            raise ConfigError("--family makes up a model of its own; leave MODEL out")
        return run_family(family, config, keep, as_json)
    if model is None and cell is not None and (certificate is not None or keep is None):
        return run_cell(cell, config, certificate, as_json)
    if model is None and certificate is not None:
        return run_certificate(certificate, config, tokens, as_json, keeps_others=add_missing)
    if certificate is not None:
        raise ConfigError("--certificate makes up models of its own; leave MODEL out")
    if model is None or keep is not None:
        raise click.UsageError("name a model with --model, or a family with --family (and --keep)")
    if config.num_ranks > 1:
        return run_ranks(model, config, max_tokens or QUICK_TOKENS, prompts_file, as_json)
    from plait.verify.verify import Extent

    usual = (QUICK_GRAPH_TOKENS, GRAPH_TOKENS) if graph else (QUICK_TOKENS, TOKENS)
    extent = Extent(is_quick=quick, only=cell, is_small=graph is not None)
    prompts = read_prompts(prompts_file) if prompts_file else None
    return run_matrix(model, config, extent, batch, max_tokens or usual[not quick], prompts, as_json)


def run_matrix(
    model: str,
    config: EngineConfig,
    extent: Extent,
    batch: int,
    max_tokens: int,
    prompts: list[str | list[int]] | None,
    as_json: bool,
) -> int:
    """Run every way of the extent; 1 if something differs."""
    from plait.kernels.load import wide_tiles
    from plait.loading.build import load
    from plait.ops.chip import EXAMPLES
    from plait.verify.prompts import SHORT_BLOCK
    from plait.verify.verify import Verification

    if extent.is_small and config.block_size == EngineConfig().block_size:
        config = replace(config, block_size=SHORT_BLOCK)
    with wide_tiles() if extent.is_small else nullcontext():
        with LoadingBar(f"loading {model}") as loading:
            loaded = load(model, config, loading.update, example=EXAMPLES[90] if extent.is_small else None)
        try:
            with Status("running each request alone") as status:
                made = Verification(
                    loaded, batch=batch, max_tokens=max_tokens, prompts=prompts, extent=extent
                )
                run = run_as_json if as_json else run_as_text
                results = run(model, made, status)
        finally:
            loaded.front.close(drain=False)
    return int(any(result.differences for result in results))


def run_family(name: str, config: EngineConfig, keep: Path | None, as_json: bool) -> int:
    """Check the families of that name, or of that plug-in; 1 if something is wrong."""
    from plait.verify.family import check_plugin

    found = []
    with Status(f"checking {name}") as status:
        for finding in check_plugin(name, config, keep):
            status.clear()
            found.append(finding)
            if not as_json:
                say(f"  {'ok   ' if finding.is_right else 'WRONG'}  {finding.name}: {finding.note}")
    wrong = sum(not finding.is_right for finding in found)
    if as_json:
        facts = {"family": name, "same": not wrong, "checks": [asdict(finding) for finding in found]}
        write_json(facts)
    else:
        say(f"{wrong} of {len(found)} checks failed" if wrong else f"all {len(found)} checks passed")
    return int(wrong > 0)


def run_ranks(
    model: str, config: EngineConfig, max_tokens: int, prompts_file: Path | None, as_json: bool
) -> int:
    """Compare a model on several ranks with itself on one; 1 if what is promised is not kept."""
    from plait.verify.ranks import check_ranks

    prompts = read_prompts(prompts_file) if prompts_file else None
    with Status(f"checking {model}") as status:
        found = check_ranks(model, config, max_tokens=max_tokens, prompts=prompts, say=status.say)
        status.clear()
    if as_json:
        write_json({"model": model, "same": found.is_right, **asdict(found)})
    else:
        say(make_heading(f"{model}: {found.num_ranks} ranks compared with one"), *rank_lines(found))
    return int(not found.is_right)


def rank_lines(found: RankCheck) -> list[str]:
    """What was compared, what differs, and where that begins."""
    promised = "the same bits" if found.is_exact else "the same sums in another order"
    if not (found.is_exact or found.is_float32):
        promised += " of rounded inputs, so close choices may differ (--deterministic: none does)"
    replies = f"{found.num_tokens} tokens of {found.num_replies} replies, greedy and with seeds"
    lines = [f"  promised: {promised}; sums have {found.num_shares} shares", f"  {replies}"]
    lines += [f"  replies with other tokens: {', '.join(found.other_tokens) or 'none'}"]
    lines += [f"  replies with other bits in log-probabilities: {len(found.other_bits) or 'none'}"]
    lines += [f"  logits of a prompt: off by at most {found.largest:.2g} of the largest"]
    lines += [f"  {found.place}"] if found.place else []
    return [*lines, "  as promised" if found.is_right else "  NOT as promised"]


def read_prompts(path: Path) -> list[str | list[int]]:
    """A prompt per line, empty lines left out. Raises ConfigError."""
    found: list[str | list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line) if line.startswith("[") else line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: it begins with [ and is no list: {error}") from error
    if not found:
        raise ConfigError(f"{path} has no prompt: write one per line")
    return found


def run_as_json(model: str, made: Verification, status: Status) -> Sequence[CellResult]:
    """Run the matrix, then write one object."""
    results = [*report_timed(made, status)]
    status.clear()
    facts = {
        "model": model,
        "same": not any(result.differences for result in results),
        "arithmetic": asdict(made.arithmetic) | {"promised": made.arithmetic.is_promised},
        "requests": [
            {"name": asked.name, "prompt_tokens": asked.prompt_len, "turn": asked.turn}
            for asked in made.asked.values()
        ],
        "cells": [
            asdict(result) | {"num_different": result.num_different, "num_rounded": result.num_rounded}
            for result in results
        ],
    }
    write_json(facts)
    return results


def report_timed(made: Verification, status: Status) -> Iterator[CellResult]:
    """The results; meanwhile `status` says how many ways are left, and about how long they take."""
    cells, started = made.cells, time.perf_counter()
    status.say(f"way 1 of {len(cells)}: {cells[0].name}")
    for done, result in enumerate(made.results(), 1):
        yield result
        if done < len(cells):
            left = (time.perf_counter() - started) / done * (len(cells) - done)
            status.say(f"way {done + 1} of {len(cells)}: {cells[done].name}; about {left:.0f} s left")


def run_as_text(model: str, made: Verification, status: Status) -> Sequence[CellResult]:
    """Run the matrix and write every row as it is done."""
    cells, results = made.cells, []
    width = max(len(cell.name) for cell in cells)
    status.clear()
    say(make_heading(f"{model}: {len(made.asked)} requests, {len(cells)} ways to run them"))
    say(*arithmetic_lines(made.arithmetic), "")
    say(f"  {'':{width}}  replies  tokens  other tokens  other bits")
    for result in report_timed(made, status):
        results.append(result)
        status.clear()
        say(row(result, width))
    status.clear()
    differences = [d for result in results for d in result.differences]
    if differences:
        say("", make_heading("differences"))
    for difference in sorted(differences, key=lambda d: not d.place)[:MOST_SHOWN]:
        say(*difference_lines(difference, made.loaded.front.tokenizer))
    if len(differences) > MOST_SHOWN:
        say(f"  … and {len(differences) - MOST_SHOWN} more (--json has them all)")
    say("", *verdict(results, made.arithmetic))
    return results


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def arithmetic_lines(found: Arithmetic) -> list[str]:
    """What computes, and what may be expected of it."""
    kv = found.dtype if found.kv_dtype == "model" else found.kv_dtype
    state = "" if found.state_dtype == "float32" else f", recurrent state {found.state_dtype}"
    lines = [
        "  compared with a sequence alone, its prompt in one chunk, nothing kept, no drafts",
        f"  arithmetic: {found.device}, {found.dtype}, keys and values {kv}{state}; step: {found.step}",
    ]
    if found.is_promised:
        return [*lines, "  native kernels: the same bits are promised, whatever shares a batch"]
    return [
        *lines,
        f"  no promise: {loose(found.loose)} may round by the batch, so near ties may fall either way",
    ]


def loose(ops: Mapping[str, str]) -> str:
    return ", ".join(f"{op} ({variant})" for op, variant in sorted(ops.items()))


def row(result: CellResult, width: int) -> str:
    """One cell of the matrix."""
    counts = result.counts
    happened = [f"{counts[key]} {text}" for key, text in HAPPENED.items() if counts.get(key)]
    if counts.get("drafted"):
        happened.append(f"{counts.get('accepted', 0)} of {counts['drafted']} draft tokens accepted")
    if not result.happened:
        happened = [f"{NOTHING.get(result.proof or '', 'it did not come about')}: this shows nothing"]
    numbers = f"{result.num_replies:7}  {result.num_tokens:6}"
    differences = f"{result.num_different or '-':>12}  {result.num_rounded or '-':>10}"
    return f"  {result.cell:{width}}  {numbers}  {differences}  {', '.join(happened)}".rstrip()


def difference_lines(found: Difference, tokenizer: Tokenizer | None) -> list[str]:
    """One difference, and where it comes from if that was looked for."""
    where = f"  {found.cell}: {found.request}, token {found.index + 1} (position {found.position})"
    near = "a near tie, " if found.gap is not None and found.gap < NEAR else ""
    gap = "" if found.gap is None else f"; {near}the best two logits were {found.gap:.3g} apart"
    if found.is_token:
        names = [name_token(token_id, tokenizer) for token_id in (found.found, found.expected)]
        what = f"{names[0]} instead of {names[1]}{gap}"
    else:
        what = f"the same token, its log-probability off by {found.off_by or 0.0:.3g}{gap}"
    lines = [f"{where}: {what}"]
    lines += [f"    {found.place}"] if found.place else []
    return lines + ([f"    {found.note}"] if found.note else [])


def name_token(token_id: int | None, tokenizer: Tokenizer | None) -> str:
    """A token as its number and its text."""
    if token_id is None:
        return "no token"
    return f"{token_id} {tokenizer.token_text(token_id)!r}" if tokenizer else str(token_id)


def verdict(results: Sequence[CellResult], arithmetic: Arithmetic) -> list[str]:
    """What all of it says."""
    replies, tokens = (sum(getattr(r, name) for r in results) for name in ("num_replies", "num_tokens"))
    other, rounded = (sum(getattr(r, name) for r in results) for name in ("num_different", "num_rounded"))
    compared = f"{tokens:,} tokens of {replies:,} replies"
    if not other and not rounded:
        return [f"no difference in {compared}"]
    lines = [f"{other} replies with other tokens, {rounded} with the same tokens and other bits: {compared}"]
    if arithmetic.is_promised:
        return [*lines, "that breaks Plait's promise for these kernels: please report it with this output"]
    return [*lines, f"rounding by the batch: {loose(arithmetic.loose)}; a CPU's native kernels have none"]
