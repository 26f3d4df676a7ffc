"""Attention over paged memory. A block table says where each sequence's tokens are; batches are ragged.

The references go through the sequences one by one, so that a result cannot depend on the batch composition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.entry import Form, head_forms, head_widths, latent_form, latent_width, stored_dtype
from plait.ops.registry import Arguments, op

SEQS = [1, 7, 5, 40]  # lengths: history lies in a layout of the variant's own, so that cases start without
CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_heads=2, dim=16, window=None, softcap=None),
    dict(seqs=SEQS, heads=6, kv_heads=2, dim=32, window=None, softcap=None),
    dict(seqs=SEQS, heads=4, kv_heads=1, dim=64, window=9, softcap=None),
    dict(seqs=[50, 30], heads=4, kv_heads=4, dim=16, window=None, softcap=20.0),
    dict(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None),
    dict(seqs=[530, 4], heads=4, kv_heads=2, dim=24, window=70, softcap=30.0),
    dict(seqs=[270, 4], heads=8, kv_heads=1, dim=40, window=None, softcap=None, kv_dtype="bfloat16"),
    dict(seqs=SEQS, heads=2, kv_heads=2, dim=8, window=9, softcap=None, kv_dtype="bfloat16"),
    dict(seqs=[300, 2, 1], heads=6, kv_heads=2, dim=16, window=None, softcap=None, sinks=True),
    dict(seqs=SEQS, heads=4, kv_heads=4, dim=24, window=9, softcap=20.0, sinks=True),
    dict(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None, kv_dtype="int8"),
    dict(seqs=[270, 4], heads=8, kv_heads=1, dim=40, window=70, softcap=30.0, kv_dtype="int8"),
    dict(seqs=SEQS, heads=6, kv_heads=2, dim=20, window=9, softcap=None, sinks=True, kv_dtype="int8"),
    dict(seqs=[300, 2], heads=6, kv_heads=3, dim=24, window=None, softcap=None, alibi=True),
    dict(seqs=SEQS, heads=4, kv_heads=4, dim=20, window=9, softcap=20.0, alibi=True, kv_dtype="int8"),
    dict(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None, kv_dtype="int7"),
    dict(seqs=SEQS, heads=4, kv_heads=1, dim=96, window=70, softcap=30.0, sinks=True, kv_dtype="int7"),
    dict(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None, kv_dtype="int4"),
    dict(seqs=[270, 4], heads=8, kv_heads=1, dim=96, window=70, softcap=30.0, kv_dtype="int4", alibi=True),
]
# If linear layers round activations, queries and weights of values may be rounded over a bfloat16 cache.
ROUNDED: Case = {"kv_dtype": "bfloat16", "activations": "int8"}
TOKEN_SINKS: Case = {"sinks": True, "token_sinks": True}  # a score of each token's heads
CASES += [
    Case(seqs=[300, 2], heads=9, kv_heads=3, dim=64, window=None, softcap=None) | ROUNDED,
    Case(seqs=[530, 4], heads=4, kv_heads=2, dim=24, window=70, softcap=30.0) | ROUNDED,
    Case(seqs=[*SEQS, 270], heads=8, kv_heads=1, dim=40, window=None, softcap=None, sinks=True) | ROUNDED,
    Case(seqs=[300, 1], heads=4, kv_heads=4, dim=256, window=None, softcap=None) | ROUNDED,
    Case(seqs=[270, 4], heads=6, kv_heads=3, dim=32, window=None, softcap=None, alibi=True) | ROUNDED,
]
CASES += [
    Case(seqs=[300, 2, 1], heads=6, kv_heads=2, dim=16, window=None, softcap=None) | TOKEN_SINKS,
    Case(seqs=SEQS, heads=6, kv_heads=2, dim=20, window=9, softcap=None, kv_dtype="int8") | TOKEN_SINKS,
    Case(seqs=[*SEQS, 270], heads=8, kv_heads=1, dim=40, window=70, softcap=None) | TOKEN_SINKS | ROUNDED,
    dict(seqs=[*SEQS, 270], heads=6, kv_heads=2, dim=16, window=14, softcap=None, chunk=7),
    dict(seqs=[530, 4, 1], heads=4, kv_heads=4, dim=24, window=300, softcap=20.0, chunk=300, kv_dtype="int8"),
    Case(seqs=[*SEQS, 600], heads=8, kv_heads=1, dim=40, window=70, softcap=None, chunk=35) | ROUNDED,
    dict(seqs=[*SEQS, 300], heads=6, kv_heads=2, dim=16, window=None, softcap=None, canvas=4),
    dict(seqs=[530, 3], heads=4, kv_heads=2, dim=24, window=None, softcap=None, canvas=32, kv_dtype="int8"),
    Case(seqs=[*SEQS, 530], heads=8, kv_heads=2, dim=32, window=None, softcap=None, canvas=32) | ROUNDED,
    dict(seqs=[*SEQS, 300], heads=6, kv_heads=2, dim=16, window=None, softcap=20.0, open_canvas=7),
    dict(
        seqs=[530, 3], heads=4, kv_heads=2, dim=24, window=70, softcap=None, open_canvas=32, kv_dtype="int8"
    ),
    Case(seqs=[*SEQS, 600], heads=8, kv_heads=1, dim=40, window=9, softcap=None, open_canvas=24) | ROUNDED,
]
BLOCK = 16  # of the test cases
MOST_SCORES = 1 << 26  # that a reference has in memory at a time, of long prompts


def write_paged(cache: Tensor, values: Tensor, slot_mapping: Tensor, form: Form = None) -> None:
    """Store an entry per new token. cache: [blocks, block_size, ...], values: [T, ...], slot_mapping: [T].

    `form`: of the entries, if they are codes.
    """
    if form:
        values = form.encode(values)
    cache.view(-1, *cache.shape[2:])[slot_mapping] = values.to(cache.dtype)


def read_paged(cache: Tensor, table: Tensor, start: int, stop: int, form: Form = None) -> Tensor:
    """Entries of tokens start..stop of one sequence, [stop - start, ...]; with a `form` what codes stand for,
    in float32. table: [M] block ids."""
    size = cache.shape[1]
    first = start // size
    blocks = cache[table[first : -(-stop // size)]]
    entries = blocks.flatten(0, 1)[start - first * size : stop - first * size]
    return form.decode(entries) if form else entries


def visible(
    query: Tensor,
    seqs: tuple[Tensor, Tensor],
    window: int | None,
    per_key: int = 0,
    canvas_start: Tensor | None = None,
) -> Iterator[tuple[int, slice, int, int]]:
    """Per sequence: (its number, its rows of the batch, the first key any of them sees, the end of keys).

    per_key: how many scores a row has for each key. Then a long prompt comes in parts, each as if the
    sequence ended with it, of `MOST_SCORES` scores at most, or of one row.
    """
    starts, lens = seqs[0].tolist(), seqs[1].tolist()
    opened = lens if canvas_start is None else canvas_start.tolist()
    for s, whole in enumerate(lens):
        first, stop = starts[s], starts[s + 1]
        most = max(1, MOST_SCORES // (per_key * max(whole, 1)) if per_key else stop - first)
        for at in range(first, stop, most) or (first,):
            rows = slice(at, min(at + most, stop))
            end = whole - (stop - rows.stop)
            past = min(end - (rows.stop - rows.start), opened[s])
            yield s, rows, 0 if window is None else max(0, past - window + 1), end


def causal_mask(
    num_queries: int,
    start: int,
    end: int,
    window: int | None,
    device: torch.device,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: int | None = None,
) -> Tensor:
    """[queries, keys] bool: the last `num_queries` positions of start..end see keys up to themselves, or to
    the end of their canvas.

    A window ends with its query, with the query's chunk, or from `canvas_start` on with that position.
    """
    behind = -positions_ahead(num_queries, start, end, device)
    if canvas_start is not None:
        queries = torch.arange(end - num_queries, end, device=device)[:, None]
        seen = (behind >= 0) | (queries >= canvas_start)
        ahead = (queries - canvas_start).clamp(min=0)
        return seen if window is None else seen & (behind - ahead < window)
    if canvas is not None:
        return behind + canvas > torch.arange(end - num_queries, end, device=device)[:, None] % canvas
    if window is None:
        return behind >= 0
    if chunk is None:
        return (behind >= 0) & (behind < window)
    ahead = chunk - 1 - torch.arange(end - num_queries, end, device=device)[:, None] % chunk
    return (behind >= 0) & (behind + ahead < window)


def positions_ahead(num_queries: int, start: int, end: int, device: torch.device) -> Tensor:
    """[queries, keys] int64: by how much each key of start..end is ahead of each of the last queries."""
    keys = torch.arange(start, end, device=device)
    return keys - torch.arange(end - num_queries, end, device=device)[:, None]


@op(cases=CASES, private=("k_cache", "v_cache"), is_product=True)
def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    step: dict[object, object] | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values; then causal softmax attention over all each sequence has in memory.

    q: [T, heads, d], k, v: [T, kv_heads, d], caches: [blocks, block_size, kv_heads, d], or of codes
    (`ops.entry.head_widths` bytes instead of d numbers), block_table: [S, M], slot_mapping: [T],
    query_start: [S+1], seq_lens: [S] (new tokens included) -> [T, heads, d]. Query head h reads kv head
    h // (heads / kv_heads). `window`: how many last keys are seen; `softcap`: scores become cap·tanh(·/cap).
    `sinks`: [heads] float32, a score of each head for a key with the value 0 (Xiao et al. 2023; gpt-oss); or
    [T, heads], dense, one that each token has for it (IQuest Q1).
    `k` and `v` None: `ops.place.place_heads` has stored them. `step`: where kernels leave what other layers
    of the step need, too (`Batch.step`). `slopes`: [heads] float32, what a score of each head loses with
    every position that the key lies behind (ALiBi; Press et al. 2021). `chunk`: a window ends with the chunk
    of so many positions in which its query is (Llama 4, Rnj-1). `canvas`: a query sees all of the so many
    positions among which it is, those behind it, too, as far as the sequence goes (SDAR; Cheng et al. 2025);
    there is no window then. `canvas_start`: [S] int64, from which position on queries of a sequence see all
    of it, and have windows that end with this position; its length where there are none (DiffusionGemma).
    There are neither chunks nor `canvas` then. The variant that writes a cache decides how it lies in memory.
    """
    k_form, v_form = head_forms(q.shape[-1], k_cache.dtype)
    if k is not None and v is not None:
        write_paged(k_cache, k, slot_mapping, k_form)
        write_paged(v_cache, v, slot_mapping, v_form)
    out = torch.empty_like(q)
    for s, rows, start, end in visible(q, (query_start, seq_lens), window, 0, canvas_start):
        keys = read_paged(k_cache, block_table[s], start, end, k_form).float()
        values = read_paged(v_cache, block_table[s], start, end, v_form).float()
        grouped = q[rows].float().unflatten(1, (keys.shape[1], -1))  # [n, kv, g, d]
        scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) * scale
        if slopes is not None:
            ahead = positions_ahead(rows.stop - rows.start, start, end, q.device)
            scores = scores + slopes.float().view(*scores.shape[:2], 1, 1) * ahead
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        opened = None if canvas_start is None else int(canvas_start[s])
        mask = causal_mask(rows.stop - rows.start, start, end, window, q.device, chunk, canvas, opened)
        own = sinks[rows] if sinks is not None and sinks.dim() == 2 else sinks
        probs = share_softmax(scores.masked_fill(~mask, -math.inf), own)
        out[rows] = torch.einsum("kgnt,tkd->nkgd", probs, values).flatten(1, 2).to(q.dtype)
    return out


def share_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys of scores [kv, g, n, keys], and over a sink that takes its share.

    sinks: [kv * g], or [n, kv * g].
    """
    if sinks is None:
        return scores.softmax(-1)
    kv, group, rows, _ = scores.shape
    beside = sinks.float().view(-1, kv * group).T.reshape(kv, group, -1, 1).expand(-1, -1, rows, 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


@paged_attention.inputs
def _paged_attention_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, kv = sum(case["seqs"]), (case["kv_heads"], case["dim"])
    q = torch.randn(total, case["heads"], case["dim"], dtype=dtype, device=device)
    k, v = (torch.randn(total, *kv, dtype=dtype, device=device) for _ in range(2))
    widths, rows = head_widths(case["dim"], case.get("kv_dtype", "")), (num_blocks, BLOCK, case["kv_heads"])
    caches = [random_cache((*rows, width), case, dtype, device) for width in widths]
    sinks = torch.randn(case["heads"], device=device) if case.get("sinks") else None
    if case.get("token_sinks"):
        sinks = torch.randn(total, case["heads"], device=device)
    slopes = torch.rand(case["heads"], device=device) if case.get("alibi") else None
    how = (case["dim"] ** -0.5, case["window"], case["softcap"], sinks)
    more = {"slopes": slopes, "chunk": case.get("chunk"), "canvas": case.get("canvas")}
    if size := case.get("open_canvas"):  # not where a sequence is no longer than that
        more["canvas_start"] = torch.where(where[3] > size, where[3] - size, where[3])
    return (q, k, v, *caches, *where, *how), more


def random_cache(shape: tuple[int, ...], case: Case, dtype: torch.dtype, device: str) -> Tensor:
    kept = stored_dtype(case["kv_dtype"]) if "kv_dtype" in case else dtype
    garbage = torch.randn(*shape, device=device) * 50
    return (garbage.abs() if kept == torch.uint8 else garbage).to(kept)


def paged_case(lengths: Sequence[int], device: str) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], int]:
    """((block_table, slot_mapping, query_start, seq_lens), num_blocks) of whole sequences in shuffled blocks:
    what `cases` of paged ops share."""
    needs = [-(-length // BLOCK) for length in lengths]
    ids = torch.randperm(sum(needs)) + 1
    table = torch.zeros(len(lengths), max(needs), dtype=torch.int64)
    for s, part in enumerate(ids.split(needs)):
        table[s, : len(part)] = part
    slots = [table[s, t // BLOCK] * BLOCK + t % BLOCK for s, n in enumerate(lengths) for t in range(n)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    where = (table, torch.stack(slots), starts, torch.tensor(lengths))
    return tuple(t.to(device) for t in where), sum(needs) + 1  # type: ignore[return-value]


LATENT_CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_rank=16, rope_dim=4),
    dict(seqs=SEQS, heads=3, kv_rank=32, rope_dim=8),
    dict(seqs=[130, 3], heads=16, kv_rank=64, rope_dim=32),
    dict(seqs=[150, 3], heads=5, kv_rank=24, rope_dim=6, kv_dtype="bfloat16"),
    dict(seqs=[150, 3], heads=16, kv_rank=160, rope_dim=32, kv_dtype="int8"),
    dict(seqs=SEQS, heads=3, kv_rank=20, rope_dim=6, kv_dtype="int8"),
    dict(seqs=[150, 3], heads=16, kv_rank=160, rope_dim=32, kv_dtype="int4"),
    dict(seqs=[150, 3], heads=16, kv_rank=160, rope_dim=32, kv_dtype="int7"),
    dict(seqs=SEQS, heads=3, kv_rank=64, rope_dim=6, kv_dtype="int7", window=9),
    dict(seqs=[270, 4], heads=3, kv_rank=24, rope_dim=6, window=70),
    dict(seqs=SEQS, heads=4, kv_rank=20, rope_dim=6, window=9, kv_dtype="int8", sinks=True),
    dict(seqs=[1, 6], heads=5, kv_rank=80, rope_dim=0, window=4, kv_dtype="int8", sinks=True),
]


@op(cases=LATENT_CASES, private=("cache",), is_product=True)
def paged_latent_attention(
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    step: dict[object, object] | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """MLA with the key up-projection absorbed into q (DeepSeek-V2, 2.1): all heads read one latent per token.

    q: [T, heads, kv_rank + rope_dim], latent: [T, kv_rank + rope_dim] (new, stored first), cache: [blocks,
    block_size, kv_rank + rope_dim], or of codes (`ops.entry.latent_width` bytes) -> [T, heads,
    kv_rank], which the value up-projection turns into the heads' outputs. `latent` None:
    `ops.place.place_latent` has stored it. The rest as in `paged_attention`.
    """
    form = latent_form(kv_rank, q.shape[-1] - kv_rank, cache.dtype)
    if latent is not None:
        write_paged(cache, latent, slot_mapping, form)
    out = q.new_empty(*q.shape[:2], kv_rank)
    for s, rows, start, end in visible(q, (query_start, seq_lens), window):
        known = read_paged(cache, block_table[s], start, end, form).float()
        scores = torch.einsum("nhr,tr->hnt", q[rows].float(), known) * scale
        mask = causal_mask(rows.stop - rows.start, start, end, window, q.device)
        probs = share_softmax(scores.masked_fill(~mask, -math.inf)[:, None], sinks)[:, 0]
        out[rows] = torch.einsum("hnt,tr->nhr", probs, known[:, :kv_rank]).to(q.dtype)
    return out


@paged_latent_attention.inputs
def _latent_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, width = sum(case["seqs"]), case["kv_rank"] + case["rope_dim"]
    q = torch.randn(total, case["heads"], width, dtype=dtype, device=device)
    latent = torch.randn(total, width, dtype=dtype, device=device)
    kept = latent_width(case["kv_rank"], case["rope_dim"], case.get("kv_dtype", ""))
    cache = random_cache((num_blocks, BLOCK, kept), case, dtype, device)
    sinks = torch.randn(case["heads"], device=device) if case.get("sinks") else None
    more = {"window": case.get("window"), "sinks": sinks}
    return (q, latent, cache, *where, width**-0.5, case["kv_rank"]), more
