"""Forms of attention over paged memory: what models of published sizes launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from plait.kernels.triton.attention.attention import MOST_TILES, attend, count_items
from plait.kernels.triton.attention.layout import ROWS, SPLIT, PagedLayout
from plait.kernels.triton.attention.mix import turn_form
from plait.kernels.triton.forms import FLOAT16, KernelForm, as_float16, as_float32, as_half
from plait.ops.entry import key_codes, latent_codes, value_codes

POINTERS = {
    "q": "bf16*", "k_cache": "bf16*", "v_cache": "bf16*", "k_words": "bf16*", "v_words": "bf16*",
    "table": "i64*",
    "query_start": "i64*", "seq_lens": "i64*", "canvas_start": "i64*",
    "items": "i32*", "slots": "i32*", "starts": "i32*",
    "counters": "i32*", "out": "bf16*", "part": "fp32*", "part_sums": "fp32*", "sinks": "fp32*",
    "slopes": "fp32*",
    "q_row": "i32!", "q_head": "i32!", "table_row": "i32!", "scale": "fp32",
}  # fmt: skip
CODE_POINTERS = {"k_cache": "i8*", "v_cache": "i8*", "k_words": "i16*", "v_words": "i16*"}
SHAPES = {  # heads, kv_heads, dim, rest, window, softcap, sinks, codes
    "gqa 32/8 d128": (32, 8, 128, 0, None, None, False, False),
    "gqa 32/32 d80": (32, 32, 80, 0, None, None, False, False),
    "gqa 32/32 d96": (32, 32, 96, 0, 2047, None, False, False),
    "gqa 9/3 d64": (9, 3, 64, 0, None, None, False, False),
    "gqa 64/8 d64 window sinks": (64, 8, 64, 0, 128, None, True, False),
    "gqa 8/4 d256 window softcap": (8, 4, 256, 0, 4096, 50.0, False, False),
    "gqa 8/2 d512": (8, 2, 512, 0, None, None, False, False),
    "gqa 32/8 d128 int8": (32, 8, 128, 0, None, None, False, True),
    "gqa 9/3 d64 int8": (9, 3, 64, 0, None, None, False, True),
    "gqa 8/4 d256 int8": (8, 4, 256, 0, None, None, False, True),
    "gqa 8/2 d512 int8": (8, 2, 512, 0, None, None, False, True),
    "mla 16 heads": (16, 1, 512, 64, None, None, False, False),
    "mla 128 heads": (128, 1, 512, 64, None, None, False, False),
    "mla 16 heads int8": (16, 1, 512, 64, None, None, False, True),
    "gqa 8/4 d256 softcap": (8, 4, 256, 0, None, 50.0, False, False),
    "gqa 64/8 d64 sinks": (64, 8, 64, 0, None, None, True, False),
    "gqa 32/32 d128 alibi": (32, 32, 128, 0, None, None, False, False),
    "gqa 32/8 d128 window int8": (32, 8, 128, 0, 4096, None, False, True),
    "gqa 8/4 d256 softcap int8": (8, 4, 256, 0, None, 50.0, False, True),
    "gqa 8/4 d256 window softcap int8": (8, 4, 256, 0, 4096, 50.0, False, True),
    "gqa 64/8 d64 sinks int8": (64, 8, 64, 0, None, None, True, True),
    "gqa 64/8 d64 window sinks int8": (64, 8, 64, 0, 128, None, True, True),
    "gqa 64/1 d512 window sinks int8": (64, 1, 512, 0, 128, None, True, True),
    "gqa 32/32 d128 alibi int8": (32, 32, 128, 0, None, None, False, True),
    "gqa 48/8 d128 token sinks": (48, 8, 128, 0, None, None, True, False),
    "gqa 48/8 d128 window token sinks": (48, 8, 128, 0, 4096, None, True, False),
    "gqa 48/8 d128 token sinks int8": (48, 8, 128, 0, None, None, True, True),
    "gqa 48/8 d128 window token sinks int8": (48, 8, 128, 0, 4096, None, True, True),
    "gqa 32/8 d128 chunks": (32, 8, 128, 0, 1024, None, False, False),
    "gqa 32/8 d128 chunks int8": (32, 8, 128, 0, 1024, None, False, True),
    "gqa 32/8 d128 canvas": (32, 8, 128, 0, None, None, False, False),
    "gqa 32/8 d128 canvas int8": (32, 8, 128, 0, None, None, False, True),
    "gqa 16/8 d256 window open canvas": (16, 8, 256, 0, 1024, None, False, False),
    "gqa 16/2 d512 open canvas": (16, 2, 512, 0, None, None, False, False),
    "gqa 16/8 d256 window open canvas int8": (16, 8, 256, 0, 1024, None, False, True),
    "gqa 16/2 d512 open canvas int8": (16, 2, 512, 0, None, None, False, True),
    "mla 16 heads window": (16, 1, 512, 64, 512, None, False, False),
    "mla 16 heads window int8": (16, 1, 512, 64, 512, None, False, True),
}
TOKEN_SINKS = tuple(name for name in SHAPES if "token sinks" in name)
CHUNKS = {"gqa 32/8 d128 chunks": 512, "gqa 32/8 d128 chunks int8": 512}
CANVASES = {"gqa 32/8 d128 canvas": 4, "gqa 32/8 d128 canvas int8": 32}
OPEN = tuple(name for name in SHAPES if "open canvas" in name)
LEANING = ("gqa 32/32 d128 alibi", "gqa 32/32 d128 alibi int8")
WIDE_SHAPES = (
    "gqa 32/8 d128",
    "gqa 9/3 d64",
    "gqa 9/3 d64 int8",
    "gqa 64/8 d64 sinks",
    "gqa 64/8 d64 sinks int8",
    "gqa 64/8 d64 window sinks",
    "gqa 64/8 d64 window sinks int8",
    *TOKEN_SINKS,
    *CHUNKS,
    *CANVASES,
    *(name for name in OPEN if name != "gqa 16/2 d512 open canvas"),  # that one spills 104 words
    "gqa 8/4 d256 window softcap",
    "gqa 8/2 d512",
    "gqa 8/4 d256 int8",
    "gqa 8/2 d512 int8",
    "gqa 32/8 d128 int8",
    "mla 16 heads",
    "mla 16 heads int8",
    "gqa 32/32 d96",
    "gqa 8/4 d256 softcap",
    *("gqa 32/32 d128 alibi", "gqa 8/4 d256 softcap int8", "gqa 8/4 d256 window softcap int8"),
)
ROUNDED_SHAPES = (
    *("gqa 32/8 d128", "gqa 8/4 d256 window softcap", "gqa 8/2 d512", "mla 16 heads"),
    *("gqa 9/3 d64", "gqa 64/8 d64 sinks", "gqa 64/8 d64 window sinks"),
    *("gqa 48/8 d128 token sinks", "gqa 48/8 d128 window token sinks", "gqa 32/8 d128 chunks"),
    "gqa 32/8 d128 canvas",
)
HALF_SHAPES = (  # in float16, as most models of that dtype have them
    "gqa 32/8 d128",
    "gqa 32/32 d80",
    "gqa 32/32 d96",
    "gqa 9/3 d64",
    *("gqa 64/8 d64 sinks", "gqa 64/8 d64 window sinks", "gqa 48/8 d128 token sinks"),
    "gqa 8/4 d256 softcap",
    "gqa 8/4 d256 window softcap",
    "gqa 8/2 d512",
    "gqa 32/32 d128 alibi",
    "gqa 32/8 d128 int8",
    "gqa 9/3 d64 int8",
    "gqa 32/8 d128 window int8",
    *("mla 16 heads", "mla 16 heads int8"),
    "gqa 32/8 d128 canvas",
)
KINDS = {"bf16*": torch.bfloat16, "fp16*": torch.float16, "fp32*": torch.float32, "i8*": torch.int8}


def forms() -> Iterator[KernelForm]:
    """Each shape with the tiles of decodes and of prompts, some in float32, over a cache of another dtype."""
    for name, (*_, coded) in SHAPES.items():
        types = POINTERS | (CODE_POINTERS if coded else {})
        yield from _attend_forms(name, types)
    wide = POINTERS | {"q": "fp32*", "out": "fp32*"}
    float32 = dict.fromkeys(("k_cache", "v_cache", "k_words", "v_words"), "fp32*")
    for name in WIDE_SHAPES:
        kept = CODE_POINTERS if SHAPES[name][-1] else float32
        yield from _attend_forms(name, wide | kept, ", float32")
    for name in ROUNDED_SHAPES:
        yield from _attend_forms(name, wide, ", float32 over bfloat16")
    for name in ("gqa 32/8 d128", "gqa 8/4 d256 window softcap", "gqa 8/2 d512", "mla 16 heads"):
        yield from _attend_forms(name, POINTERS | float32, " over float32")
    for name in HALF_SHAPES:
        types = as_half(POINTERS) | (CODE_POINTERS if SHAPES[name][-1] else {})
        yield from _attend_forms(name, types, FLOAT16)
    constants = PagedLayout(32, 8, 128, 0, None, None, None).constants(64, ROWS)
    few = {key: constants[key] for key in ("S", "G", "KVH", "BM")}
    for name, window, chunk, is_open in (
        *(("count_items", 0, 0, False), ("count_items, window", 4096, 0, False)),
        ("count_items, chunks", 1024, 512, False),
        *(("count_items, open canvas", 0, 0, True), ("count_items, window open canvas", 1024, 0, True)),
    ):
        sizes = {**few, "WINDOW": window, "CHUNK": chunk, "OPEN": is_open}
        yield KernelForm(name, count_items, POINTERS, {**sizes, "SPLIT": SPLIT, "TILES": MOST_TILES})
    turn = turn_form(512)
    yield from (turn, as_float32(turn), as_float16(turn))


def _attend_forms(name: str, types: Mapping[str, str], suffix: str = "") -> Iterator[KernelForm]:
    """The forms of one shape: of decodes, and of prompts where those have others."""
    heads, kv_heads, dim, rest, window, softcap, sinks, coded = SHAPES[name]
    form = latent_codes(dim, rest) if rest else key_codes(dim)
    dtype, kept = KINDS[types["q"]], types["k_cache"]
    layout = PagedLayout(heads, kv_heads, dim, rest, form if coded else None, window, softcap, dtype)
    widths = (form.width, form.width if rest else value_codes(dim).width) if coded else (dim + rest,) * 2
    caches = [torch.empty(1, 64, kv_heads, width, dtype=KINDS[kept], device="meta") for width in widths]
    is_wide, same = dtype == torch.float32, types["q"] == kept
    demands = (() if is_wide else ("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128") if same else ())
    for step in ("decodes", "prompts")[: 1 if rest or is_wide else 2]:
        rows = layout.rows(step == "prompts", KINDS[kept])
        constants = layout.constants(64, rows)
        constants |= layout.attention(caches[0], caches[1], sinks, name in LEANING)
        constants |= {"TOKEN_SINKS": name in TOKEN_SINKS, "CHUNK": CHUNKS.get(name, 0)}
        constants |= {"CANVAS": CANVASES.get(name, 0), "OPEN": name in OPEN}
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        yield KernelForm(
            f"attend, {name}, {step}{suffix}", attend, types, constants, warps, stages, demands=demands,
            options=layout.options(KINDS[kept], name in LEANING), shares_rows=True,
        )  # fmt: skip
