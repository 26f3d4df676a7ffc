"""`plait warmup`: makes kernels and packed weights ahead, so that no user waits for them at startup."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plait.cache_folder import NO_HOME, make_folder
from plait.checkpoint.packed_cache.file_format import clear, default_folder
from plait.cli.common.format_model import bytes_text
from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import Bytes, common_options, engine_options, engine_settings, model_option
from plait.cli.common.progress import Status
from plait.cli.generate import load

if TYPE_CHECKING:
    from plait.llm.llm import LLM

LIMIT = "64GiB"


@click.command(cls=GroupedCommand)
@model_option(required=False)
@click.option("--packed/--no-packed", default=True, help="keep packed weights on the disk, too")
@click.option(
    "--packed-limit",
    type=Bytes(),
    default=LIMIT,
    metavar="BYTES",
    show_default=True,
    help="the most that the folder of packed weights may hold",
)
@click.option("--clear", "clears", is_flag=True, help="remove packed weights: of MODEL (a name), or all")
@engine_options()
@common_options()
def warmup(model: str | None, packed: bool, packed_limit: int, clears: bool, **given: object) -> None:
    """Load a model, run one step, and keep what was made for it: compiled kernels and packed weights.

    \b
    plait warmup --model model.gguf
    plait warmup --model ./model --cache-dir ./cache
    plait warmup --clear

    Compiled kernels depend on the formats and sizes of a model and on this machine, not on its weights.
    Packed weights are a second copy of the model's, as kernels read them, which later runs map.
    """
    settings = engine_settings(given)
    folder = _folder(settings["packed_cache"], settings["cache_dir"])
    if clears:
        if folder is None:
            raise click.UsageError(NO_HOME)
        freed = clear(folder, model)
        print(f"removed packed weights from {folder}: {bytes_text(freed)} freed")
        return
    if model is None:
        raise click.UsageError("name a model with --model, or --clear")
    if packed and settings["packed_cache"] != "off" and folder is not None:
        _make(folder)
    if settings["startup_image"] == "auto":
        settings["startup_image"] = "renew"
    started = time.perf_counter()
    llm = load(model, settings)
    if packed and llm.drop_damaged():
        print(f"packed weights of {model} in {folder} were damaged: they are made again", file=sys.stderr)
        llm.close()
        llm = load(model, settings)
    try:
        _run(llm, started)
        if packed:
            with Status("writing packed weights"):
                kept = llm.keep_packed(packed_limit)
            print(kept)
            print(llm.keep_image(packed_limit))
    finally:
        llm.close()
    later = f"compiles again: {llm.unkept}" if llm.unkept else "loads what was made"
    print(f"the next run {later}", file=sys.stderr)


def _run(llm: LLM, started: float) -> None:
    from plait.request import SamplingParams

    loaded_s = time.perf_counter() - started
    with Status("running a step (kernels are compiled where there are none)"):
        for temperature in (0.0, 1.0):  # choosing the largest and drawing are two kernels
            llm.generate([0], SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True))
    print(f"step: {llm.step_kind}")
    print(f"loaded in {loaded_s:.1f} s, first tokens after {time.perf_counter() - started:.1f} s")


def _folder(packed_cache: str, cache_dir: str | None) -> Path | None:
    """Where packed weights are or would be kept; None without a home."""
    return default_folder(cache_dir) if packed_cache in ("auto", "off") else Path(packed_cache)


def _make(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        print(f"packed weights: none are kept: {folder} cannot be made ({error.strerror})", file=sys.stderr)
