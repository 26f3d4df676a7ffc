"""`plait doctor`: what this machine has, what of it is used, and what prevents more."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import click

from plait.cli.common.doctor_checks import DoctorRequest, Facts, Finding, examine
from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import common_options, json_option, to_json
from plait.cli.model_facts.tables import columns, make_heading
from plait.config import Isa

BYTES = {
    "vnni": "with AVX-512 VNNI",
    "avx-vnni": "with AVX-VNNI",
    "avx2": "with AVX2",
    "neon-i8mm": "with NEON, dotprod and i8mm",
    "neon-dotprod": "with NEON and dotprod",
    "neon": "with NEON",
}
SIGNS = {"broken": "✗", "warning": "!", "note": "·"}


@click.command()
@json_option()
@click.option(
    "--formats", "show_formats", is_flag=True, help="every storage format and which kernel reads it"
)
@click.option("--threads", type=click.IntRange(1), help="check this many, as other commands would get them")
@click.option("--isa", type=click.Choice(get_args(Isa)), default="native", help="check these instructions")
@click.option("--cache-dir", help="check this folder for compiled kernels")
@common_options()
def doctor(
    as_json: bool, show_formats: bool, threads: int | None, isa: str, cache_dir: str | None
) -> int | None:
    """What this machine has, which kernels run on it, and what is wrong or slow.

    Ends with code 1 if something is broken, else with 0. Loads no model.
    """
    facts, findings = examine(DoctorRequest(threads, cache_dir, isa))
    if show_formats:
        facts["formats"] = format_rows()
    lines = [to_json(facts)] if as_json else text_lines(facts, findings)
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if any(f.level == "broken" for f in findings) else None


def format_rows() -> list[dict[str, str]]:
    """Every storage of a linear layer: the variant that serves it on this CPU, or why none does."""
    import torch

    from plait.kernels.load import has_numba, load_kernels
    from plait.ops.linear import FLOATS, KINDS, STORED, linear
    from plait.ops.registry import OpFacts

    load_kernels()
    executor = object() if has_numba() else None
    rows = []
    for name in ("float32", "bfloat16", "float16", *KINDS, *(s for s in STORED if "+" not in s), *FLOATS):
        rounding = "float32" if name in FLOATS or name.endswith(("float32", "float16")) else "int8"
        rounding = "bfloat16" if name == "bfloat16" else rounding
        sizes = {"n_in": 1024, "n_out": 1024, "kind": name, "activations": rounding}
        asked, why = OpFacts("cpu", torch.float32, sizes, executor), list[str]()
        for variant in linear.variants:
            if (refusal := variant.refusal(asked)) is None:
                break
            why += [] if refusal.startswith("runs on") else [f"not {variant.name}: {refusal}"]
        else:
            rows.append({"format": name, "variant": "reference", "why": "; ".join(why)})
            continue
        rows.append({"format": name, "variant": variant.name, "why": ""})
    return rows


def text_lines(facts: Facts, findings: Iterable[Finding]) -> list[str]:
    """The facts for a reader in a terminal."""
    system, kernels, hub = facts["system"], facts["kernels"], facts["hub"]
    lines = [make_heading("machine"), *columns(machine_rows(facts))]
    lines += ["", make_heading("software"), f"  Python {system['python']}, {system['executable']}"]
    versions = [f"{name} {number}" for name, number in facts["versions"].items() if number]
    lines += [f"  {', '.join(versions[i : i + 6])}" for i in range(0, len(versions), 6)]
    lines += ["", make_heading("kernels"), *columns([*kernel_rows(kernels), *more_rows(facts)])]
    if "formats" in facts:
        lines += ["", make_heading("formats")]
        lines += columns([(r["format"], r["variant"], r["why"]) for r in facts["formats"]])
    lines += ["", make_heading("Hub"), *columns(hub_rows(hub))]
    found = [
        line for f in findings for line in (f"  {SIGNS[f.level]} {f.level}: {f.what}", f"    → {f.advice}")
    ]
    return [*lines, "", make_heading("findings"), *(found or ["  nothing is wrong"])]


def machine_rows(facts: Facts) -> list[tuple[str, str]]:
    cpu, memory, torch = facts["cpu"], facts["memory"], facts["torch"]
    quota = f", a CPU quota of {cpu['quota']:g}" if cpu["quota"] else ""
    threads = f"{cpu['threads']} thread{'s' * (cpu['threads'] > 1)} by default"
    amounts = [
        f"{bytes_text(memory[key])} {word}"
        for key, word in (("total", "in all"), ("available", "available"), ("limit", "allowed here"))
        if memory[key]
    ]
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in facts["gpus"]] or ["none"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    return [
        ("processor", cpu["name"]),
        ("cores", f"{cpu['physical']} physical, {cpu['logical']} logical{quota}; {threads}"),
        ("vectors", " ".join(cpu["flags"]) or "none known"),
        ("memory", ", ".join(amounts) or "unknown"),
        ("GPU", ", ".join(gpus)),
        ("torch", f"{torch['version'] or 'not installed'}, {build}"),
        ("templates run behind", ", ".join(facts["walls"]) or "nothing: they cannot run"),
    ]


def kernel_rows(kernels: Mapping[str, Any]) -> list[tuple[str, str]]:
    if kernels["target"] is None:
        return [("none", "Numba is not installed: every op runs its reference in torch")]
    return [
        ("compiled for", kernels["target"]),
        ("bytes are multiplied", BYTES.get(kernels["dot"], "plainly")),
        ("AMX", f"not used: {kernels['no_amx']}" if kernels["no_amx"] else "tried when a model is loaded"),
        (
            "read as stored",
            f"float32, bfloat16, float16, {', '.join(kernels['formats'])}; more with --formats",
        ),
        ("kept in", cache_text(kernels["cache"])),
    ]


def cache_text(cache: Mapping[str, Any] | None) -> str:
    """What is kept of compiled kernels, and where."""
    if cache is None:
        return "nowhere: there is no home folder"
    current, old = cache["current"], cache["old"]
    kept = f"{bytes_text(current['nbytes'])} compiled" if current["nbytes"] else "nothing compiled yet"
    more = f", {len(old)} older folders of {bytes_text(sum(old.values()))}" if old else ""
    return f"{cache['folder']}: {kept}{more}"


def packed_row(packed: Mapping[str, Any]) -> tuple[str, str]:
    models = ", ".join(packed["models"])
    kept = f"{bytes_text(packed['nbytes'])} of {models}" if models else "none; `plait warmup` keeps a model's"
    return ("packed weights", f"{packed['folder'] or 'nowhere'}: {kept}")


def more_rows(facts: Facts) -> list[tuple[str, str]]:
    """What is known of kernels on GPUs, and the packed weights that are kept."""
    rows = [
        (
            "on GPUs",
            f"{found['chip']}, driver {found['driver'] or 'unknown'}: {found['tried']} tried, "
            f"{len(found['rejected'])} not used",
        )
        for found in facts["gpu_kernels"]
    ]
    none = "none was tried here: the first startup on a GPU compares each with its reference"
    return [*(rows or [("on GPUs", none)]), packed_row(facts["packed"])]


def hub_rows(hub: Mapping[str, Any]) -> list[tuple[str, str]]:
    if hub["library"] is None:
        return [("library", "not installed")]
    state = ["offline"] if hub["offline"] else []
    state += ["logged in" if hub["logged_in"] else "not logged in"]
    free = f", {bytes_text(hub['free'])} free" if hub["free"] is not None else ""
    return [
        ("library", f"huggingface_hub {hub['library']}, {', '.join(state)}"),
        ("kept in", f"{hub['folder']}: {hub['repositories']} models{free}"),
    ]
