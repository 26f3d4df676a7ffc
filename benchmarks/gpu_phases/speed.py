"""Phase 3: kernels and peers timed in graphs, in the sizes of published models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_phases.machine import read_gb_s, tflop_s
from gpu_phases.results import Bench, Item
from gpu_phases.right import STANDARD
from gpu_phases.timing import copied, copies_for, settle, time_us
from plait.bench.ops.roofline import decode_step, work_of
from plait.bench.ops.run import case_text, tensors
from plait.kernels.load import load_for_gpu
from plait.model.mixers.registry import list_mixers
from plait.ops.linear import Packing
from plait.ops.registry import REGISTRY, Op, OpFacts

KINDS = ("Q4_K", "Q6_K", "Q8_0", "int4_g128", "fp8_b128")
STATES = ("state", "angle", "prev_b", "prev_x", "tail")  # read and written
Case = Mapping[str, Any]


def _decodes(count: int, **sizes: Any) -> Case:
    return {"seqs": [(1, True)] * count, "decodes": count, **sizes}


def _indexed(seqs: Sequence[int], latent: Case) -> Iterator[tuple[str, Case]]:
    """Of DeepSeek-V3.2, for few sequences: the first call has all tokens of each, with a choice for each."""
    sizes = dict(seqs=seqs, top_k=2048, decode=True)
    yield "choose_keys", {**sizes, "heads": 64, "index_dim": 128}
    yield "sparse_latent_attention", {**sizes, **latent}


def speed_cases(bench: Bench) -> Iterator[tuple[str, Case]]:
    """(op, case); the short form has decodes of one and of 64 sequences."""
    counts = (1, 16, 64, 256) if bench.is_full else (1, 64)
    if bench.is_dry:
        yield "mamba1_scan", _decodes(1, heads=2, dim=16, state=16, groups=1)
        yield "linear", dict(rows=1, n_in=64, n_out=32, bias=False)
        return
    for n_out, n_in in ((6144, 4096), (28672, 4096), (4096, 14336))[: None if bench.is_full else 2]:
        for rows in (1, 8, 16, 64, 512) if bench.is_full else (1, 16, 512):
            yield "linear", dict(rows=rows, n_in=n_in, n_out=n_out, bias=False)
            for kind in KINDS if bench.is_full else KINDS[:1]:
                yield "linear", dict(rows=rows, n_in=n_in, n_out=n_out, kind=kind, bias=False)
    for count in counts:
        for length in (1025, 16385) if bench.is_full else (4097,):
            heads = dict(heads=32, kv_heads=8, dim=128, window=None, softcap=None)
            yield "paged_attention", {"seqs": [length] * count, **heads, "decode": True}
            latent = dict(heads=16, kv_rank=512, rope_dim=64)
            yield "paged_latent_attention", {"seqs": [length] * count, **latent, "decode": True}
            yield from _indexed([length] * min(count, 16), latent)
        yield "mamba2_scan", _decodes(count, heads=128, dim=64, state=128, groups=1)
        yield "gated_delta_scan", _decodes(count, heads=32, keys=16, key_dim=128, dim=128)
        yield "gated_mamba1_scan", _decodes(count, heads=64, dim=128, state=16, groups=1, normed=True)
        yield "raw_mamba3_scan", _decodes(count, heads=64, dim=64, state=128, groups=1)
        yield "rg_lru", _decodes(count, heads=10, dim=256)
        yield "wkv7_scan", _decodes(count, heads=40, dim=64)
        yield "add_rms_norm", dict(tokens=count, hidden=4096, groups=1)
        yield "add_stacked_low_rank", dict(rows=count, n_in=4096, outs=(4096, 1024, 1024), ranks=(16,) * 4)
    yield "paged_attention", dict(seqs=[2048], heads=32, kv_heads=8, dim=128, window=None, softcap=None)
    for op in ("mamba2_scan", "gated_delta_scan", "gated_mamba1_scan"):
        sizes = dict(heads=64, dim=64, state=128, groups=1)
        if op == "gated_delta_scan":
            sizes = dict(heads=32, keys=16, key_dim=128, dim=128)
        elif op == "gated_mamba1_scan":
            sizes = dict(heads=64, dim=128, state=16, groups=1, normed=True)
        yield op, {"seqs": [(2048, False)], "decodes": 0, **sizes}
    yield "wkv7_scan", {"seqs": [(2048, False)], "decodes": 0, "heads": 40, "dim": 64}
    yield "add_stacked_low_rank", dict(rows=2048, n_in=4096, outs=(4096, 1024, 1024), ranks=(16,) * 4)
    per_channel = dict(heads=32, keys=32, key_dim=128, dim=128, channel=True)  # Kimi Delta Attention
    yield "gated_delta_scan", {"seqs": [(2048, False)], "decodes": 0, **per_channel}


def list_speeds(bench: Bench) -> Iterator[Item]:
    """What is bound for each case, then its peers."""
    load_for_gpu()
    list_mixers()
    dtype = torch.float32 if bench.is_dry else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    for op_name, case in speed_cases(bench):
        op = REGISTRY[op_name]
        facts = OpFacts("cuda", dtype, {**STANDARD, **case}, chip=bench.chip)
        fn, binding = op.bind_parts(facts)
        shape, variant = case_text(case), binding[0].variant
        yield Item(op.name, variant, shape, name, lambda a=(op, case, fn): _time(bench, *a, dtype), needs_s=4)
        for peer, make in PEERS.get(op_name, {}).items():
            if "kind" not in case:
                what = lambda a=(op, case, make): _time(bench, *a[:2], None, dtype, a[2])  # noqa: E731
                yield Item(op.name, "peer", shape, name, what, peer, needs_s=8)


@torch.inference_mode()
def _time(
    bench: Bench,
    op: Op,
    case: Case,
    fn: Callable[..., Any] | None,
    dtype: torch.dtype,
    peer: Callable[[Case, Sequence[Any]], Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Time, work and share of the roof of one op, or of a peer with the same arguments."""
    torch.manual_seed(0)
    assert op.make is not None
    args, kwargs = op.make(case, dtype, str(bench.device))
    if case.get("decode"):
        (fn or op.reference)(*args, **kwargs)  # history lies in a layout of the variant's own
        args = decode_step(op.name, args)
    work = work_of(op.name, case, args)
    nbytes, flops = (work.nbytes, work.flops) if work else (_touched(op, args), 0)
    sets = [args] + [tuple(map(copied, args)) for _ in range(copies_for(bench, nbytes) - 1)]
    if peer is not None:
        calls = [peer(case, own) for own in sets]
    elif isinstance(fn, Packing):
        packed = [(own[0], fn.pack(own[1], dtype), *own[2:]) for own in sets]
        calls = [lambda own=own: fn.apply(*own, **kwargs) for own in packed]
    else:
        assert fn is not None
        calls = [lambda own=own: fn(*own, **kwargs) for own in sets]
    us = time_us(bench, calls)
    settle(bench)
    roof = max(nbytes / read_gb_s(bench) / 1e3, flops / tflop_s(bench) / 1e6)
    share = None if bench.is_dry else roof / us
    return {"us": us, "bytes": nbytes, "flops": flops, "share_of_roof": share}


def _touched(op: Op, args: Sequence[Any]) -> int:
    """Bytes of all arguments once, of states twice, and of a result like the first argument."""
    names = list(inspect.signature(op.reference).parameters)
    total = sum(t.nbytes for t in tensors([args[0]]))
    for name, value in zip(names, args, strict=False):
        nbytes = getattr(value, "nbytes", 0)
        total += 2 * nbytes if name in STATES else nbytes
    return int(total)


def _mm(case: Case, args: Sequence[Any]) -> Callable[[], Any]:
    x, weight = args[0], args[1].tensor.to(args[0].dtype)
    return lambda: F.linear(x, weight)


def _gathered(case: Case, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of prompts, whole, and the keys and values they see: [S, heads, n, d] each."""
    seqs = len(case["seqs"])
    q, k, v = (t.unflatten(0, (seqs, -1)).transpose(1, 2) for t in args[:3])
    return q, k, v


def _flex(case: Case, args: Sequence[Any]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.get("decode"):
        raise NotImplementedError("prompts alone are compared with FlexAttention")
    q, k, v = _gathered(case, args)
    n = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=q.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _varlen(case: Case, args: Sequence[Any]) -> Callable[[], Any]:
    """torch's FlashAttention: whole prompts, and decodes over pages. Raises NotImplementedError."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} takes no pages")
    q, k, v, k_cache, v_cache, table, _, starts, lens = args[:9]
    starts, causal, most = starts.to(torch.int32), (-1, 0), max(case["seqs"])
    if not case.get("decode"):
        return lambda: varlen_attn(q, k, v, starts, starts, most, most, window_size=causal, enable_gqa=True)
    paged = {"seqused_k": lens.to(torch.int32), "block_table": table.to(torch.int32), "enable_gqa": True}
    return lambda: varlen_attn(q, k_cache, v_cache, starts, None, 1, most, window_size=causal, **paged)


PEERS: Mapping[str, Mapping[str, Callable[[Case, Sequence[Any]], Callable[[], Any]]]] = {
    "linear": {"cuBLAS": _mm},
    "paged_attention": {"FlexAttention": _flex, "varlen_attn": _varlen},
}
