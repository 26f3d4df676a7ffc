"""`plait bench`: how fast a model and its ops are here, checked before it is reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from plait.cli.bench_serve import serve
from plait.cli.common.options import (
    Command,
    TokenIds,
    common_options,
    engine_option,
    engine_options,
    engine_settings,
    find_changes,
    json_option,
    model_option,
    parse_options,
    write_json,
)
from plait.cli.common.progress import Status, console
from plait.config import DType

if TYPE_CHECKING:
    from plait.bench.model.run import Job

KINDS: tuple[Any, ...] = ("decode", "prefill", "ttft", "batch", "requests")
SIZES = {
    "contexts": "tokens before the decode that is timed [default: 20,128,512,1000]",
    "lengths": "tokens of the prompts of prefill [default: 128,512,2048]",
    "prompts": "tokens of the prompts of the time to the first token [default: 16,512]",
    "batches": "sequences that decode at once [default: 1,4,16,64]",
}


@click.group()
def bench() -> None:
    """Measure how fast a model and its ops are here. Results are checked before they are timed."""


def _sizes(command: Command) -> Command:
    for name, text in reversed(SIZES.items()):
        command = click.option(f"--{name}", type=TokenIds(), metavar="N,N,…", help=text)(command)
    return command


@bench.command()
@model_option()
@click.option(
    "--compare",
    "compare",
    multiple=True,
    metavar="WHAT",
    help="compare it, in turns, with this: another model's path, options in quotes, a git revision, or an "
    "engine: llama.cpp, transformers, vllm, sglang, openvino, onnxruntime-genai, ctranslate2 (each with "
    "@PYTHON and =MODEL, if it has an interpreter or files of its own), ik_llama.cpp@FOLDER or "
    "ik_llama.cpp-rtr@FOLDER of its programs; may be repeated",
)
@click.option(
    "--measure", "kinds", multiple=True, type=click.Choice(KINDS), help="only this; may be repeated"
)
@_sizes
@click.option(
    "--tokens", type=click.IntRange(1), default=32, show_default=True, help="new tokens of a decode"
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="turns that count")
@click.option(
    "--check-tokens",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="so many first greedy tokens must be the reference ops' choice, or a near tie of it",
)
@json_option()
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="also an HTML page with charts")
@engine_options()
@common_options()
def model(model: str, as_json: bool, plot: Path | None, **given: object) -> None:
    """Decode, prefill, batches, first token, start-up and memory of a model.

    \b
    plait bench model model.gguf
    plait bench model model.gguf --compare llama.cpp --compare "--ops reference" --plot bench.html
    plait bench model model.gguf --compare HEAD~1 --measure decode --json

    Each side runs in a process of its own, loads once, and is measured in turns with the others. A decode's
    share of the roof is what it reads of the stored weights, over the bandwidth measured with it.
    """
    from plait.bench.model.report import model_report, write_plot
    from plait.bench.model.run import bench_model

    with Status("measuring") as status:
        result = bench_model(_job(model, given), status.say)
    if plot is not None:
        write_plot(result, plot)
    if as_json:
        write_json(result)
    else:
        model_report(result, console())


def _job(model: str, given: dict[str, Any]) -> Job:
    from plait.bench.model.compare import contestant
    from plait.bench.model.measure import MeasureSizes
    from plait.bench.model.run import Job

    settings = find_changes(engine_settings(given))
    sizes = {name: given[name] for name in SIZES if given[name]}
    workload = MeasureSizes(
        kinds=given["kinds"] or KINDS, tokens=given["tokens"], repeats=given["repeats"], **sizes
    )
    others = [contestant(what, model, settings, parse_options) for what in given["compare"]]
    return Job(model, settings, others, workload, given["check_tokens"])


@bench.command()
@click.argument("name", required=False)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: all this process may use")
@click.option("--dtype", type=click.Choice(get_args(DType)[1:]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option(
    "--large/--small", default=True, help="with sizes of real models, or only the tests' small cases"
)
@engine_option("plugins")
@json_option()
@common_options()
def op(name: str | None, as_json: bool, **given: Any) -> None:
    """Every variant of every op, or of the op NAME: checked against its reference, then timed.

    \b
    plait bench op
    plait bench op linear --threads 1 --json
    """
    from plait.bench.model.report import ops_report
    from plait.bench.model.run import WrongOutput
    from plait.bench.ops.run import bench_ops

    with Status("measuring") as status:
        result = bench_ops(name, say=status.say, **given)
    if as_json:
        write_json(result)
    else:
        ops_report(result, console())
    if wrong := [row for row in result["rows"] if row["wrong"]]:
        first = wrong[0]
        where = f"{first['op']} {first['variant']} ({first['case']})"
        raise WrongOutput(f"{len(wrong)} rows are wrong, the first is {where}: {first['wrong']}")


bench.add_command(serve)
