"""DeepSeek-V4.1's text, written down plainly token by token: the oracle of what transformers lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]
TEXT: Config = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 10,
    "o_groups": 2,
    "o_lora_rank": 9,
    "sliding_window": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 2, 3, 4],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "index_n_heads": 5,
    "index_head_dim": 16,
    "index_topk": 3,
    "rope_theta": 1e4,
    "compress_rope_theta": 2e3,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.3,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [70, 133],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 11,
    "engram_n_heads": 2,
    "engram_head_dim": 6,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 40,
}
CONFIG: Config = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "text_config": TEXT,
    "vision_config": {"num_hidden_layers": 2},
    "tie_word_embeddings": False,
}


def shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names as the published files have them."""
    size, heads, dim, wide = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["hc_mult"]
    yield from (("embed.weight", (97, size)), ("norm.weight", (size,)), ("head.weight", (97, size)))
    for i, rate in enumerate(c["compress_ratios"]):
        at, index, group = f"layers.{i}.attn", c["index_head_dim"], heads * dim // c["o_groups"]
        yield from ((f"layers.{i}.{x}_norm.weight", (size,)) for x in ("attn", "ffn"))
        for x in ("attn", "ffn"):
            rows = (2 + wide) * wide
            yield from ((f"layers.{i}.hc_{x}_fn", (rows, wide * size)), (f"layers.{i}.hc_{x}_base", (rows,)))
            yield f"layers.{i}.hc_{x}_scale", (3,)
        yield from ((f"{at}.wq_a.weight", (c["q_lora_rank"], size)), (f"{at}.wkv.weight", (dim, size)))
        yield from ((f"{at}.q_norm.weight", (c["q_lora_rank"],)), (f"{at}.kv_norm.weight", (dim,)))
        yield from ((f"{at}.wq_b.weight", (heads * dim, c["q_lora_rank"])), (f"{at}.attn_sink", (heads,)))
        yield f"{at}.wo_a.weight", (c["o_groups"] * c["o_lora_rank"], group)
        yield f"{at}.wo_b.weight", (size, c["o_groups"] * c["o_lora_rank"])
        if i in c["kv_source_layer_ids"]:
            yield from ((f"{at}.compressor.{x}.weight", (dim, size)) for x in ("wkv", "wgate")[:rate])
            yield f"{at}.compressor.norm.weight", (dim,)
            yield from ((f"{at}.indexer.wk.weight", (index, dim)), (f"{at}.indexer.k_norm.weight", (index,)))
        if i in c["index_source_layer_ids"]:
            yield f"{at}.indexer.wq_b.weight", (c["index_n_heads"] * index, c["q_lora_rank"])
            yield f"{at}.indexer.weights_proj.weight", (c["index_n_heads"], size)
        inner, ffn = c["moe_intermediate_size"], f"layers.{i}.ffn"
        yield from ((f"{ffn}.gate.weight", (6, size)), (f"{ffn}.gate.bias", (6,)))
        for name in ("shared_experts", *(f"experts.{e}" for e in range(c["n_routed_experts"]))):
            for w, shape in (("w1", (inner, size)), ("w2", (size, inner)), ("w3", (inner, size))):
                yield f"{ffn}.{name}.{w}.weight", shape
    for i, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
        at, columns = f"layers.{i}.engram", (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * 6
        yield from ((f"{at}.embed.weight", (rows, 6)), (f"{at}.wkv.weight", ((wide + 1) * size, columns)))
        yield from ((f"{at}.{x}_weight", (wide, size)) for x in "qk")


def checkpoint(c: Config) -> dict[str, Tensor]:
    """Random tensors in double precision, and a table of merged ids."""
    made = torch.Generator().manual_seed(1)
    found = {
        name: torch.randn(shape, dtype=torch.float64, generator=made) * 0.3
        + (("norm" in name or name.endswith(("scale", "q_weight", "k_weight"))) and 1.0)
        for name, shape in shapes(c)
    }
    merged = torch.randint(0, c["engram_compressed_vocab_size"], (c["vocab_size"],), generator=made)
    return {**found, **{f"layers.{i}.engram.token_map": merged for i in c["engram_layer_ids"]}}


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, position: int, theta: float, dim: int) -> Tensor:
    """The last `dim` numbers of x [..., d], pairs of neighbours, by the angles of one position."""
    angle = position * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    still, a, b = x[..., :-dim], x[..., -dim:][..., ::2], x[..., -dim:][..., 1::2]
    both = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat([still, torch.stack(both, -1).flatten(-2)], -1)


def logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    wide, eps, count = c["hc_mult"], c["rms_norm_eps"], len(ids)
    x = t["embed.weight"][ids][:, None].repeat(1, wide, 1)
    read = torch.zeros(count, wide, dtype=torch.float64)
    read[:, 0] = 1.0  # the first branch reads the first stream
    shared: dict[str, Any] = {}
    for i in range(c["num_hidden_layers"]):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in t.items() if k.startswith(f"layers.{i}.")}
        if i in c["engram_layer_ids"]:
            x = x + engram(c, w, i, x, hash_rows(c, w["engram.token_map"].tolist(), ids.tolist(), i))
        for part in ("attn", "ffn"):
            pre, post, mixed = weigh(c, w, part, x)
            y = rms((read[..., None] * x).sum(1), w[f"{part}_norm.weight"], eps)
            y = attend(c, w, i, y, shared) if part == "attn" else mix_experts(c, w, y)
            x, read = post[..., None] * y[:, None] + torch.einsum("tjk,tjn->tkn", mixed, x), pre
    return rms((read[..., None] * x).sum(1), t["norm.weight"], eps) @ t["head.weight"].T


def weigh(c: Config, w: Tensors, part: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By which weights streams are read (by the next branch), written and mixed."""
    wide, eps = c["hc_mult"], c["hc_eps"]
    raw = rms(x.flatten(1), 1.0, c["rms_norm_eps"]) @ w[f"hc_{part}_fn"].T
    sizes = [wide, wide, wide * wide]
    raw = raw * w[f"hc_{part}_scale"].repeat_interleave(torch.tensor(sizes)) + w[f"hc_{part}_base"]
    pre, post, mixed = raw.split(sizes, 1)
    mixed = mixed.unflatten(1, (wide, wide)).softmax(2) + eps
    for k in range(c["hc_sinkhorn_iters"]):
        mixed = mixed / (mixed.sum(2, keepdim=True) + eps) if k else mixed
        mixed = mixed / (mixed.sum(1, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), mixed


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def hash_rows(c: Config, merged: Sequence[int], ids: Sequence[int], layer: int) -> Tensor:
    """Rows of the table of each token's n-grams, [T, n-grams × heads]."""
    longest, heads = c["engram_max_ngram_size"], c["engram_n_heads"]
    each, which = (longest - 1) * heads, c["engram_layer_ids"].index(layer)
    primes = [n for n in range(c["engram_vocab_size"], 1000) if is_prime(n)][which * each :][:each]
    bound = (2**63 - 1) // c["engram_compressed_vocab_size"] // 2
    factors = [int(x) * 2 + 1 for x in np.random.default_rng(10007 * layer).integers(0, bound, longest)]
    rows = []
    for at in range(len(ids)):
        found, number = [], merged[ids[at]] * factors[0]
        for back in range(1, longest):
            token = ids[at - back] if back <= at else c["engram_pad_token_id"]
            number ^= merged[token] * factors[back]
            for head in range(heads):
                k = (back - 1) * heads + head
                found.append(number % primes[k] + sum(primes[:k]))
        rows.append(found)
    return torch.tensor(rows)


def engram(c: Config, w: Tensors, layer: int, x: Tensor, rows: Tensor) -> Tensor:
    """What is added to the streams x [T, K, n]."""
    wide, size, eps = c["hc_mult"], c["hidden_size"], c["rms_norm_eps"]
    made = w["engram.embed.weight"][rows].flatten(1) @ w["engram.wkv.weight"].T
    key, value = made[:, : wide * size].unflatten(1, (wide, size)), made[:, wide * size :]
    match = (rms(x, w["engram.q_weight"], eps) * rms(key, w["engram.k_weight"], eps)).sum(-1) / size**0.5
    gate = torch.copysign(match.abs().clamp(min=1e-6).sqrt(), match).sigmoid()
    return gate[..., None] * value[:, None]


def attend(c: Config, w: Tensors, layer: int, x: Tensor, shared: dict[str, Any]) -> Tensor:
    """x: [T, n] -> its like. `shared`: entries and keys, choices and candidates of layers so far."""
    eps, dim, turns, rate = (
        c["rms_norm_eps"],
        c["head_dim"],
        c["qk_rope_head_dim"],
        c["compress_ratios"][layer],
    )
    theta = c["compress_rope_theta"] if rate else c["rope_theta"]
    raw = rms(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], eps)
    q = (raw @ w["attn.wq_b.weight"].T).unflatten(1, (-1, dim))
    near = rms(x @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"], eps)
    near = torch.stack([turn(k, at, theta, turns) for at, k in enumerate(near)])
    if layer in c["kv_source_layer_ids"]:
        make_entries(c, w, rate, x, theta, shared)
    if layer in c["index_source_layer_ids"]:
        choose(c, w, layer, x, raw, theta, shared)
    outs = []
    for at in range(len(x)):
        keys = near[max(0, at - c["sliding_window"] + 1) : at + 1]
        if rate:
            keys = torch.cat([keys, shared["entries"][shared["chosen"][at]]])
        scores = turn(q[at], at, theta, turns) @ keys.T * dim**-0.5
        shares = torch.cat([scores, w["attn.attn_sink"][:, None]], 1).softmax(1)[:, :-1]
        outs.append(turn(shares @ keys, -at, theta, turns))
    grouped = torch.stack(outs).flatten(1).unflatten(1, (c["o_groups"], -1))
    first = w["attn.wo_a.weight"].unflatten(0, (c["o_groups"], -1))
    return torch.einsum("tgn,gmn->tgm", grouped, first).flatten(1) @ w["attn.wo_b.weight"].T


def make_entries(c: Config, w: Tensors, rate: int, x: Tensor, theta: float, shared: dict[str, Any]) -> None:
    """An entry of each whole window of `rate` tokens, and its index key."""
    eps, turns, entries, keys = c["rms_norm_eps"], c["qk_rope_head_dim"], [], []
    for start in range(0, len(x) - rate + 1, rate):
        window = x[start : start + rate]
        latent = window @ w["attn.compressor.wkv.weight"].T
        if rate > 1:
            latent = (window @ w["attn.compressor.wgate.weight"].T).softmax(0) * latent
        latent = rms(latent.sum(0), w["attn.compressor.norm.weight"], eps)
        entries.append(turn(latent, start, theta, turns))
        key = rms(latent @ w["attn.indexer.wk.weight"].T, w["attn.indexer.k_norm.weight"], eps)
        keys.append(turn(key, start, theta, turns))
    shared["entries"], shared["keys"] = torch.stack(entries), torch.stack(keys)


def choose(
    c: Config, w: Tensors, layer: int, x: Tensor, raw: Tensor, theta: float, shared: dict[str, Any]
) -> None:
    """The best entries of each token, in candidates alone where an earlier layer has chosen some."""
    source, size, rate = (
        *(c["candidate_source_layer_id"], c["candidate_block_size"]),
        c["compress_ratios"][layer],
    )
    q = (raw @ w["attn.indexer.wq_b.weight"].T).unflatten(1, (c["index_n_heads"], -1))
    by, chosen, blocks = x @ w["attn.indexer.weights_proj.weight"].T, [], []
    for at in range(len(x)):
        known = (at + 1) // rate
        scores = (turn(q[at], at, theta, c["qk_rope_head_dim"]) @ shared["keys"][:known].T).relu()
        scores = by[at] @ scores
        if 0 <= source < layer:
            others = [e for e in range(known) if e // size not in shared["blocks"][at]]
            scores[others] = -torch.inf
        if layer == source:
            best = [float(part.max()) for part in scores.split(size)] if known else []
            best[-1:] = [math.inf] if known else []
            order = sorted(range(len(best)), key=lambda b: -best[b])
            blocks.append(order[: c["candidate_topk_blocks"]])
        order = [e for e in scores.argsort(descending=True).tolist() if scores[e] > -torch.inf]
        chosen.append(order[: c["index_topk"]])
    shared["chosen"] = chosen
    if layer == source:
        shared["blocks"] = blocks


def mix_experts(c: Config, w: Tensors, x: Tensor) -> Tensor:
    def expert(name: str, x: Tensor) -> Tensor:
        gate, down, up = (w[f"ffn.{name}.w{k}.weight"] for k in (1, 2, 3))
        limit = c["swiglu_limit"]
        return (F.silu((x @ gate.T).clamp(max=limit)) * (x @ up.T).clamp(-limit, limit)) @ down.T

    scores = F.softplus(x @ w["ffn.gate.weight"].T).sqrt()
    best = (scores + w["ffn.gate.bias"]).topk(c["num_experts_per_tok"], 1).indices
    by = torch.zeros_like(scores).scatter(1, best, 1.0) * scores
    by = by / (by.sum(1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
    routed = torch.stack([by[:, e, None] * expert(f"experts.{e}", x) for e in range(by.shape[1])]).sum(0)
    return routed + expert("shared_experts", x)
