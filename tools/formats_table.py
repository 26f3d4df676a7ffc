"""The table of storage formats in docs/families.md, from what the tests run; `families_table` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Title, and the names of the packings that are counted as it: kinds of quantized safetensors.
METHODS: tuple[tuple[str, str], ...] = (
    ("GPTQ, 2, 3, 4, 8 bits, both zero points, `desc_act`", r"gptq"),
    ("AWQ", r"awq"),
    ("auto-round", r"auto-round"),
    ("FP8 E4M3, per tensor, row and block (DeepSeek, Mistral, FBGEMM)", r"fp8|fbgemm"),
    ("compressed-tensors: int2 to int8, FP8, MXFP4, MXFP8, NVFP4", r"compressed"),
    ("modelopt: FP8, NVFP4", r"modelopt"),
    ("bitsandbytes: NF4, FP4, int8", r"nf4|bnb"),
)


def format_lines() -> Iterator[str]:
    """The table of storage formats: read by all means, natively on a CPU, and written."""
    from plait.cli.doctor import format_rows
    from plait.convert.plan.choose_storage import DTYPES, PACKED
    from plait.quant.encode import ENCODERS
    from plait.quant.gguf import BLOCK_TYPES

    native = {row["format"] for row in format_rows() if row["variant"].startswith("native")}
    written = {name.upper() for name in ENCODERS}
    yield "| stored as | read | native on a CPU | written by `plait convert` |"
    yield "|---|:---:|:---:|:---:|"
    yield f"| float32, bfloat16, float16 | ✓ | {_all(native, DTYPE_NAMES)} | {'✓' if DTYPES else '–'} |"
    groups: dict[tuple[bool, bool], list[str]] = {}
    for kind in BLOCK_TYPES.values():
        groups.setdefault((kind.name in native, kind.name in written), []).append(kind.name)
    for (fast, made), names in sorted(groups.items(), reverse=True):
        yield f"| GGUF {', '.join(names)} | ✓ | {'✓' if fast else '–'} | {'✓' if made else '–'} |"
    yield from _packed_lines(PACKED)


WRITTEN_AS = {"int4": "compressed-tensors", "fp8": "FP8"}  # what `plait convert` packs, by method
DTYPE_NAMES = ("float32", "bfloat16", "float16")


def _packed_lines(written: tuple[str, ...]) -> Iterator[str]:
    """Quantized safetensors, by method; `written`: what `plait convert` packs."""
    from tests.checkpoint.quantized.packings import PACKINGS

    counted = set()
    for title, pattern in METHODS:
        names = {name for name in PACKINGS if re.match(pattern, name)}
        counted |= names
        formats = {PACKINGS[name].format for name in names}
        makes = any(name in written and title.startswith(by) for name, by in WRITTEN_AS.items())
        yield f"| {title} | ✓ | {_native(formats)} | {'✓' if makes else '–'} |"
    if left := sorted(set(PACKINGS) - counted):
        raise SystemExit(f"packings without a row: {left}")
    yield f"| MXFP4 of gpt-oss | ✓ | {_native({'mxfp4'})} | – |"


def _native(formats: set[str]) -> str:
    """Whether linear layers in these formats have a kernel."""
    import torch

    from plait.ops.linear import linear
    from plait.ops.registry import OpFacts

    served = set()
    for name in formats:
        for activations in ("int8", "float32"):
            sizes = {"n_in": 1024, "n_out": 1024, "kind": name, "activations": activations}
            facts = OpFacts("cpu", torch.float32, sizes, object())
            if any(v.native and v.refusal(facts) is None for v in linear.variants):
                served.add(name)
    return "✓" if served == formats else "–" if not served else "some"


def _all(found: set[str], names: tuple[str, ...]) -> str:
    return "✓" if found >= set(names) else "–"
