"""Attention over compressed keys (DeepSeek-V4): windows of tokens become an entry, which later ones read.

`rate` tokens make an entry. In memory it lies where its last token would; `step` tokens of a block share a
place, so a cache [blocks, block_size / step, d] holds an entry for each `rate`. The references go through the
sequences one by one, so that a result cannot depend on the batch composition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.attention import (
    BLOCK,
    causal_mask,
    paged_case,
    random_cache,
    read_paged,
    share_softmax,
    visible,
    write_paged,
)
from plait.ops.case import Case, RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.entry import latent_form
from plait.ops.indexer import NONE, sort_chosen
from plait.ops.registry import Arguments, op
from plait.ops.ssm import begin, pieces

FOLDED = 3  # numbers of a channel's softmax so far: the largest logit, the sum, the weighted sum

COMPRESSED: list[RecurrentCase] = [
    dict(seqs=[(1, True)], size=16, parts=1, rate=4),
    dict(seqs=[(1, True), (40, False), (3, True)], size=37, parts=2, rate=4),
    dict(seqs=[(9, False), (70, True)], size=20, parts=1, rate=6),
]


@op(cases=COMPRESSED)
def compress_tokens(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    positions: Tensor,
    rate: int,
) -> tuple[Tensor, Tensor]:
    """Each channel's softmax over a window of `rate` tokens, and the window's first position, for each token.

    Logits are gate + bias[position in the window]; they weigh kv. With one part of `d` channels, entries are
    the sums over one window. With two, an entry is that over a window's second part and the first part of
    the window before. kv, gate: [T, parts · d], bias: [rate, parts · d], state: [slots, 2 parts - 1, 3, d]
    float32, in place, positions: [T] -> ([T, d]: the entry in rows of a window's last token, else 0; [T]).
    """
    parts, d = kv.shape[-1] // state.shape[-1], state.shape[-1]
    entries = torch.zeros(len(kv), d, device=kv.device)
    logits = (gate.float() + bias.float()[positions % rate]).unflatten(-1, (parts, d))
    numbers = kv.float().unflatten(-1, (parts, d))
    places = positions.tolist()
    for rows, slot, past in pieces(slots, query_start, has_history, 0):
        h = begin(state, slot, past).clone()
        for t in range(rows.start, rows.stop):
            if places[t] % rate == 0:
                if parts == 2:
                    h[2] = h[0]
                h[:parts] = 0
            for i in range(parts):
                one = torch.stack([logits[t, i], torch.ones(d, device=kv.device), numbers[t, i]])
                h[i] = _fold(h[i], one)
            if places[t] % rate == rate - 1:
                whole = _fold(h[2], h[1]) if parts == 2 else h[0]
                entries[t] = whole[2] / whole[1]
        state[slot] = h
    return entries.to(kv.dtype), positions // rate * rate


def _fold(a: Tensor, b: Tensor) -> Tensor:
    """Two softmaxes as one, [3, d] each; one without a sum is empty."""
    top = torch.where(a[1] > 0, torch.maximum(a[0], b[0]), b[0])
    left, right = torch.where(a[1] > 0, (a[0] - top).exp(), 0.0), (b[0] - top).exp()
    return torch.stack([top, a[1] * left + b[1] * right, a[2] * left + b[2] * right])


@compress_tokens.inputs
def _compress_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    wide, rate = case["parts"] * case["size"], case["rate"]
    kv, gate = (torch.randn(int(query_start[-1]), wide, dtype=dtype, device=device) for _ in range(2))
    bias = torch.randn(rate, wide, device=device)
    state = torch.randn(num_slots, 2 * case["parts"] - 1, FOLDED, case["size"], device=device)
    state[:, :, 1].abs_()
    first = [rate * s + 2 if past else 0 for s, (_, past) in enumerate(case["seqs"])]
    lengths = [length for length, _ in case["seqs"]]
    positions = torch.cat([torch.arange(n) + at for n, at in zip(lengths, first, strict=True)])
    return (kv, gate, bias, state, slots, query_start, has_history, positions.to(device), rate), {}


def store_entries(
    cache: Tensor, entries: Tensor, slots: Tensor, seqs: tuple[Tensor, Tensor], rate: int, step: int
) -> None:
    """Those of tokens that end a window. cache: [blocks, block_size / step, d], entries: [T, d]."""
    for _, rows, _, end in visible(entries, seqs, None):
        at = torch.arange(rows.start, rows.stop, device=entries.device)
        ends = at[(at + end - rows.stop + 1) % rate == 0]
        cache.view(-1, cache.shape[-1])[slots[ends] // step] = entries[ends].to(cache.dtype)


def read_entries(cache: Tensor, table: Tensor, end: int, rate: int, step: int) -> Tensor:
    """The entries of a sequence of `end` tokens, [end // rate, d] float32."""
    return read_paged(cache, table, 0, end // step)[rate // step - 1 :: rate // step][: end // rate].float()


def count_entries(rows: slice, end: int, rate: int, device: torch.device) -> Tensor:
    """How many entries each row of a sequence sees, [n]."""
    return (torch.arange(end - (rows.stop - rows.start), end, device=device) + 1) // rate


CHOICES: list[Case] = [
    dict(seqs=[1], heads=4, index_dim=16, top_k=3, rate=4, step=4),
    dict(seqs=[1, 7, 5, 40], heads=5, index_dim=20, top_k=3, rate=4, step=2),
    dict(seqs=[150, 3, 300], heads=8, index_dim=32, top_k=16, rate=8, step=4),
    dict(seqs=[70, 3], heads=3, index_dim=48, top_k=7, rate=4, step=4, kv_dtype="bfloat16"),
    dict(seqs=[1, 9, 30], heads=3, index_dim=16, top_k=4, rate=1, step=1),
]


@op(cases=CHOICES, private=("cache",), is_product=True)
def choose_entries(
    q: Tensor,
    weights: Tensor,
    entries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_keys` over index keys that are entries: the `top_k` of those of windows that have ended.

    -> [T, top_k] int32, rising, then NONE.
    """
    store_entries(cache, entries, slot_mapping, (query_start, seq_lens), rate, step)
    chosen = torch.full((len(q), top_k), NONE, dtype=torch.int32, device=q.device)
    for s, rows, _, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_entries(cache, block_table[s], end, rate, step)
        count = len(known)
        seen = torch.arange(count, device=q.device) < count_entries(rows, end, rate, q.device)[:, None]
        scores = torch.einsum("nhd,td->nht", q[rows].float(), known).relu()
        scores = torch.einsum("nh,nht->nt", weights[rows].float(), scores).masked_fill(~seen, -math.inf)
        order = scores.sort(descending=True, stable=True).indices[:, : min(top_k, count)]
        chosen[rows, : order.shape[1]] = sort_chosen(order, ~seen.gather(1, order), count)
    return chosen


@choose_entries.inputs
def _choose_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, heads, dim, step = sum(case["seqs"]), case["heads"], case["index_dim"], case["step"]
    q = torch.randn(total, heads, dim, dtype=dtype, device=device)
    weights, k = (torch.randn(total, n, dtype=dtype, device=device) for n in (heads, dim))
    cache = random_cache((num_blocks, BLOCK // step, dim), case, dtype, device)
    return (q, weights, k, cache, *where, case["top_k"], case["rate"], step), {}


OPEN: list[Case] = [
    dict(tokens=1, heads=1, rate=4, top_k=3),
    dict(tokens=33, heads=3, rate=4, top_k=5),
    dict(tokens=19, heads=2, rate=1, top_k=2),
]


@op(cases=OPEN)
def add_open_block(chosen: Tensor, positions: Tensor, rate: int, heads: int) -> Tensor:
    """What `choose_entries` chose, then the token's own block if it has not ended; for each of `heads`.

    chosen: [T, k] int32, positions: [T] -> [T, heads, k + 1] int32, rising, then NONE.
    """
    own = torch.where((positions + 1) % rate != 0, positions // rate, NONE).int()
    count = (chosen != NONE).sum(1, keepdim=True)
    found = torch.cat([chosen, torch.full_like(chosen[:, :1], NONE)], 1).scatter(1, count, own[:, None])
    return found[:, None].repeat(1, heads, 1)


@add_open_block.inputs
def _open_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    positions = torch.randint(0, 40, (case["tokens"],), device=device)
    chosen = torch.full((case["tokens"], case["top_k"]), NONE, dtype=torch.int32)
    for row, at in zip(chosen, positions.tolist(), strict=True):
        best = torch.randperm((at + 1) // case["rate"])[: case["top_k"]].sort().values
        row[: len(best)] = best.int()
    return (chosen.to(device), positions, case["rate"], case["heads"]), {}


@op(cases=[{key: case[key] for key in ("tokens", "rate", "top_k")} for case in OPEN])
def spread_windows(chosen: Tensor, positions: Tensor, rate: int) -> Tensor:
    """The tokens of the windows that `choose_entries` chose, then those of each token's own open window.

    chosen: [T, k] int32, positions: [T] -> [T, (k + 1) rate - 1] int32, rising, then NONE.
    """
    at = torch.arange((chosen.shape[1] + 1) * rate - 1, device=chosen.device)
    count = (chosen != NONE).sum(1, keepdim=True) * rate
    window = chosen.gather(1, (at // rate).clamp(max=chosen.shape[1] - 1).expand(len(chosen), -1))
    seen = positions[:, None] + 1
    own = seen // rate * rate + at - count
    found = torch.where(at < count, window * rate + at % rate, torch.where(own < seen, own, NONE))
    return found.int()


@spread_windows.inputs
def _spread_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (chosen, positions, rate, _), _ = _open_inputs({**case, "heads": 1}, dtype, device)
    return (chosen, positions, rate), {}


CASES: list[Case] = [
    dict(seqs=[1], heads=4, dim=16, window=4, rate=4, step=4),
    dict(seqs=[1, 7, 5, 40], heads=19, dim=34, window=9, rate=4, step=2, top_k=3),
    dict(seqs=[300, 2], heads=3, dim=32, window=70, rate=8, step=4, top_k=20),
    dict(seqs=[150, 3], heads=4, dim=24, window=9, rate=6, step=2, kv_dtype="bfloat16"),
    dict(seqs=[1, 7, 40], heads=3, dim=16, window=6, rate=1, step=1, top_k=4),
    dict(seqs=[30, 3], heads=4, dim=24, window=9, rate=2, step=2, top_k=7),
]


@op(cases=CASES, private=("cache", "packed"), is_product=True)
def entry_attention(
    q: Tensor,
    latent: Tensor | None,
    entries: Tensor | None,
    cache: Tensor,
    packed: Tensor,
    chosen: Tensor | None,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor,
    rate: int,
    step: int,
    work: dict[object, object] | None = None,
) -> Tensor:
    """One softmax over the last `window` latents, over entries, and over a sink of each head.

    A latent and an entry are key and value of all heads. q: [T, heads, d], latent, entries: [T, d] (new,
    stored first), cache: [blocks, block_size, d] of latents, packed: [blocks, block_size / step, d] of
    entries, chosen: [T, top_k] int32 as `choose_entries` gives them, or None: all of windows that have
    ended, near, far: (block_table, slot_mapping) of each, sinks: [heads] float32 -> [T, heads, d]. `latent`
    and `entries` None: `ops.place.place_compressed` has stored both. `work`: where kernels leave what other
    layers of the step need, too (`Batch.step`).
    """
    form = latent_form(q.shape[-1], 0, cache.dtype)
    seqs, out = (query_start, seq_lens), torch.empty_like(q)
    if latent is not None and entries is not None:
        write_paged(cache, latent, near[1], form)
        store_entries(packed, entries, far[1], seqs, rate, step)
    for s, rows, start, end in visible(q, seqs, window, q.shape[1]):
        known = read_paged(cache, near[0][s], start, end, form).float()
        late = read_entries(packed, far[0][s], end, rate, step)
        mask = causal_mask(rows.stop - rows.start, start, end, window, q.device)
        count = len(late)
        if chosen is None:
            seen = torch.arange(count, device=q.device) < count_entries(rows, end, rate, q.device)[:, None]
        else:
            places = chosen[rows].long()
            seen = torch.zeros(len(places), count + 1, dtype=torch.bool, device=q.device)
            seen = seen.scatter_(1, places.masked_fill(places == NONE, count), True)[:, :count]
        keys, mask = torch.cat([known, late]), torch.cat([mask, seen], 1)
        scores = torch.einsum("nhd,td->hnt", q[rows].float(), keys) * scale
        probs = share_softmax(scores.masked_fill(~mask, -math.inf)[:, None], sinks)[:, 0]
        out[rows] = torch.einsum("hnt,td->nhd", probs, keys).to(q.dtype)
    return out


@entry_attention.inputs
def _attention_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (table, slots, *seqs), num_blocks = paged_case(case["seqs"], device)
    total, heads, dim, rate, step = (sum(case["seqs"]), *(case[x] for x in ("heads", "dim", "rate", "step")))
    q = torch.randn(total, heads, dim, dtype=dtype, device=device)
    latent, entries = (torch.randn(total, dim, dtype=dtype, device=device) for _ in range(2))
    caches = [random_cache((num_blocks, BLOCK // n, dim), case, dtype, device) for n in (1, step)]
    chosen = None
    if top_k := case.get("top_k"):
        chosen = torch.full((total, top_k), NONE, dtype=torch.int32)
        places = [t for length in case["seqs"] for t in range(length)]
        for row, at in zip(chosen, places, strict=True):
            best = torch.randperm((at + 1) // rate)[:top_k].sort().values
            row[: len(best)] = best.int()
        chosen = chosen.to(device)
    sinks, where = torch.randn(heads, device=device), (table, slots)
    more = (dim**-0.5, case["window"], sinks, rate, step)
    return (q, latent, entries, *caches, chosen, where, where, *seqs, *more), {}
