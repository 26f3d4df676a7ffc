"""`plait convert`: a checkpoint in another form, another storage, or both."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import Bytes, common_options, engine_option
from plait.cli.common.progress import LoadingBar
from plait.cli.common.unread_flags import refuse_unread

if TYPE_CHECKING:
    from plait.convert.compare_quality import Comparison


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["gguf", "safetensors"]),
    help="the form of OUT: a GGUF file, or a directory of safetensors [default: by OUT's name]",
)
@click.option(
    "--quantize",
    "-q",
    metavar="STORAGE",
    help="GGUF: q8_0, q6_k, q5_k, q4_k, q4_0, …; safetensors: int4, fp8; both: bf16, f16, f32 "
    "[default: what it is stored in]",
)
@click.option("--verify", is_flag=True, help="compare logits and perplexity of both on a fixed text")
@click.option("--force", is_flag=True, help="replace OUT if it is there")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="that encode [default: the cores there are, at most a CPU quota]",
)
@click.option(
    "--max-shard",
    type=Bytes(),
    default=5_000_000_000,
    metavar="BYTES",
    help="most bytes of one file of safetensors [default: 5 GB]",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a value of MODEL's config"
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="an adapter that is merged into the weights: a folder of PEFT, or a GGUF file",
)
@engine_option("vocab")
@engine_option("plugins")
@common_options()
def convert(model: str, out: Path, overrides: tuple[str, ...], **given: Any) -> None:
    """Write MODEL to OUT, in another form (GGUF, safetensors), another storage, or both.

    Tokenizer and chat template come along. OUT appears when it is whole; memory stays far below the model's.
    """
    from plait.convert.convert import Order, choose_form, convert_model, count_text

    if given["lora"] is not None and given["verify"]:
        raise click.UsageError(
            "--verify compares OUT with MODEL, and --lora makes them differ; leave one out"
        )
    order = Order(
        model,
        out,
        given["to"],
        given["quantize"],
        given["force"],
        given["threads"],
        given["vocab"],
        overrides,
        given["max_shard"],
        given["plugins"],
        given["lora"],
    )
    refuse_unread((choose_form(order) == "gguf", ("max_shard",), "a GGUF is one file"))
    started = time.perf_counter()
    with end_by_signals(), LoadingBar("converting") as shown:
        result = convert_model(order, shown.update)
    seconds = time.perf_counter() - started
    sizes = f"{bytes_text(result.source_nbytes)} → {bytes_text(result.nbytes)}"
    sys.stdout.write(f"{result.out}: {sizes} of tensors in {seconds:.1f} s\n")
    if result.storages:
        sys.stdout.write(f"  linear layers: {count_text(result.storages)}\n")
    sys.stdout.write("".join(f"  {note}\n" for note in result.notes))
    if given["verify"]:
        from plait.convert.compare_quality import compare

        with LoadingBar("verifying") as shown:
            found = compare(order, shown.update)
        sys.stdout.write("\n".join(comparison_lines(found)) + "\n")


def comparison_lines(found: Comparison) -> list[str]:
    """The lines that `--verify` prints: perplexity and logits, before and after."""
    lines = [f"  on {found.tokens} tokens of {found.text}, both with weights in float32:"]
    if found.before is not None and found.after is not None:
        lines.append(f"  perplexity {found.before:.4f} before, {found.after:.4f} after")
    lines.append(
        f"  logits: largest difference {found.worst:.3g}, mean KL {found.kl_mean:.3g} nats, "
        f"99th percentile {found.kl_p99:.3g}, same first token {100 * found.agreement:.2f} %"
    )
    return lines


@contextmanager
def end_by_signals() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, so that what was begun is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
