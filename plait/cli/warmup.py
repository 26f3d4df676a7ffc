"""`plait warmup`: compile the kernels that a model needs on this machine, before anybody waits for it."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from plait.cli.generate import load
from plait.cli.options import common_options, engine_options, engine_settings, model_option


@click.command()
@model_option()
@engine_options()
@common_options()
def warmup(model: str, **given: Any) -> None:
    """Load a model, run one step, and keep what was compiled for it.

    \b
    plait warmup --model model.gguf
    plait warmup --model ./model --cache-dir ./kernels

    Compiled kernels depend on the formats and sizes of a model and on this machine, not on its weights.
    """
    from plait.request import SamplingParams

    started = time.perf_counter()
    llm = load(model, engine_settings(given))
    try:
        loaded_s = time.perf_counter() - started
        for temperature in (0.0, 1.0):  # choosing the largest and drawing are two kernels
            llm.generate([0], SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True))
        print(f"step: {llm.step_kind}")
        print(f"loaded in {loaded_s:.1f} s, first tokens after {time.perf_counter() - started:.1f} s")
    finally:
        llm.close()
    print("the next start loads what was compiled", file=sys.stderr)
