"""QRWKV6 and ARWKV-7, written down plainly as llama.cpp computes them, from tensors under its names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Keys = dict[str, Any]
Tensors = dict[str, Tensor]
HIDDEN, DIM, HEADS, LAYERS, VOCAB, INNER, EPS = 30, 5, 6, 3, 97, 44, 1e-5
USUAL: Keys = {
    "block_count": LAYERS,
    "context_length": 1 << 20,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.head_count": 0,
    "token_shift_count": 1,
    "vocab_size": VOCAB,
    "wkv.head_size": DIM,
}
SIX: Keys = {**USUAL, "attention.head_count_kv": 2, "time_mix_extra_dim": 4, "time_decay_extra_dim": 7}
SEVEN: Keys = {
    **USUAL,
    "attention.decay_lora_rank": 5,
    "attention.iclr_lora_rank": 6,
    "attention.value_residual_mix_lora_rank": 3,
    "attention.gate_lora_rank": 0,
}
GATED: Keys = {**SEVEN, "attention.gate_lora_rank": 8}


def metadata(c: Keys) -> Keys:
    arch = "rwkv6qwen2" if "time_mix_extra_dim" in c else "arwkv7"
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in c.items()}}


def _shapes6(c: Keys) -> Iterator[tuple[str, tuple[int, ...]]]:
    shares, decays, kv = (
        c["time_mix_extra_dim"],
        c["time_decay_extra_dim"],
        c["attention.head_count_kv"] * DIM,
    )
    for name, rows in (("receptance", HIDDEN), ("key", kv), ("value", kv)):
        yield from ((f"{name}.weight", (rows, HIDDEN)), (f"{name}.bias", (rows,)))
    yield from (("gate.weight", (HIDDEN, HIDDEN)), ("w1.weight", (5 * shares, HIDDEN)))
    yield from (("w2.weight", (5, HIDDEN, shares)), ("lerp_x.weight", (HIDDEN,)))
    yield from (("lerp_fused.weight", (5, 1, 1, HIDDEN)), ("decay.weight", (HIDDEN,)))
    yield from (("decay_w1.weight", (decays, HIDDEN)), ("decay_w2.weight", (HIDDEN, decays)))


def _shapes7(c: Keys) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate = c["attention.gate_lora_rank"]
    words = {"w": "decay", "a": "iclr", "v": "value_residual_mix", **({"g": "gate"} if gate else {})}
    for x, word in words.items():
        rank = c[f"attention.{word}_lora_rank"]
        yield from ((f"{x}1.weight", (rank, HIDDEN)), (f"{x}2.weight", (HIDDEN, rank)))
        yield from [(f"{x}0.weight", (HIDDEN,))] if x != "g" else []
    yield "lerp_fused.weight", (6 if gate else 5, 1, 1, HIDDEN)
    yield from ((f"{x}.weight", (HIDDEN,)) for x in ("k_k", "k_a", "r_k"))
    yield from ((f"{x}.weight", (HIDDEN, HIDDEN)) for x in ("receptance", "key", "value"))
    yield from ((f"ln.{end}", (HIDDEN,)) for end in (("weight", "bias") if gate else ()))


def checkpoint(c: Keys) -> Tensors:
    """Random tensors in double precision."""
    torch.manual_seed(2)
    shapes = [("token_embd.weight", (VOCAB, HIDDEN)), ("output.weight", (VOCAB, HIDDEN))]
    shapes += [("output_norm.weight", (HIDDEN,))]
    for i in range(LAYERS):
        own = _shapes6(c) if "time_mix_extra_dim" in c else _shapes7(c)
        mixing = [*own, ("output.weight", (HIDDEN, HIDDEN))]
        shapes += [(f"blk.{i}.time_mix_{name}", shape) for name, shape in mixing]
        shapes += [(f"blk.{i}.{x}_norm.weight", (HIDDEN,)) for x in ("attn", "ffn")]
        shapes += [(f"blk.{i}.ffn_{x}.weight", (INNER, HIDDEN)) for x in ("gate", "up")]
        shapes += [(f"blk.{i}.ffn_down.weight", (HIDDEN, INNER))]
    made = {}
    for name, shape in shapes:
        made[name] = torch.randn(shape, dtype=torch.float64) * (0.3 if len(shape) == 1 else 0.2)
        if name.endswith(("norm.weight", "ln.weight", "k_k.weight", "k_a.weight")):
            made[name] += 1
    return made


def logits(c: Keys, t: Tensors, ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    x, first = t["token_embd.weight"][ids], None
    for i in range(LAYERS):
        w = {k.removeprefix(f"blk.{i}."): v for k, v in t.items() if k.startswith(f"blk.{i}.")}
        own = {k.removeprefix("time_mix_").removesuffix(".weight"): v for k, v in w.items()}
        h = F.rms_norm(x, (HIDDEN,), w["attn_norm.weight"], EPS)
        if "time_mix_extra_dim" in c:
            y = _mix6(own, h)
        else:
            y, first = _mix7(own, h, first)
        x = x + y @ own["output"].T
        h = F.rms_norm(x, (HIDDEN,), w["ffn_norm.weight"], EPS)
        gated = F.silu(h @ w["ffn_gate.weight"].T) * (h @ w["ffn_up.weight"].T)
        x = x + gated @ w["ffn_down.weight"].T
    return F.rms_norm(x, (HIDDEN,), t["output_norm.weight"], EPS) @ t["output.weight"].T


def _change(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]]) - x


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, DIM))


def _mix6(w: Tensors, x: Tensor) -> Tensor:
    change = _change(x)
    low = torch.tanh((x + change * w["lerp_x"]) @ w["w1"].T).view(len(x), 5, -1)
    shares = torch.einsum("tnr,nhr->nth", low, w["w2"]) + w["lerp_fused"][:, 0]
    to_w, to_k, to_v, to_r, to_g = (x + change * share for share in shares)
    r, k, v = (
        _heads(y @ w[name].T + w[f"{name}.bias"])
        for name, y in (("receptance", to_r), ("key", to_k), ("value", to_v))
    )
    k, v = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (k, v))
    decay = w["decay"] + torch.tanh(to_w @ w["decay_w1"].T) @ w["decay_w2"].T
    kept = _heads(torch.exp(-torch.exp(decay)))
    k, state, ys = k - k * kept, torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), []
    for n in range(len(x)):
        state = kept[n][:, :, None] * state + k[n][:, :, None] * v[n][:, None, :]
        ys.append((DIM**-0.5 * r[n][:, :, None] * state).sum(1))
    return torch.stack(ys).flatten(1) * torch.sigmoid(to_g @ w["gate"].T)


def _mix7(w: Tensors, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    mixed = [x + _change(x) * share for share in w["lerp_fused"][:, 0, 0]]
    to_r, to_w, to_k, to_v, to_a = mixed[:5]
    r, k, v = to_r @ w["receptance"].T, to_k @ w["key"].T, to_v @ w["value"].T
    a = torch.sigmoid(to_a @ w["a1"].T @ w["a2"].T + w["a0"])
    kept = torch.exp(
        -(torch.tensor(-0.5).double().exp()) * (torch.tanh(to_w @ w["w1"].T) @ w["w2"].T + w["w0"]).sigmoid()
    )
    if first is not None:
        v = v + (first - v) * torch.sigmoid(to_v @ w["v1"].T @ w["v2"].T + w["v0"])
    unit = F.normalize(_heads(k * w["k_k"]), dim=-1)
    k = k + a * k * w["k_a"] - k * w["k_a"]
    r, k, values, a, kept = (_heads(y) for y in (r, k, v, a, kept))
    state, ys = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), []  # [values, keys]
    for n in range(len(x)):
        gone = (state @ unit[n][:, :, None]) @ (unit[n] * a[n])[:, None, :]
        state = state * kept[n][:, None, :] - gone + values[n][:, :, None] @ k[n][:, None, :]
        ys.append((state @ r[n][:, :, None])[..., 0])
    y = torch.stack(ys).flatten(1)
    if "ln" in w:
        y = F.group_norm(y, HEADS, w["ln"], w["ln.bias"], eps=64e-5)
    y = y + ((r * k * _heads(w["r_k"])).sum(-1, keepdim=True) * values).flatten(1)
    if "g1" in w:
        y = y * (torch.sigmoid(mixed[5] @ w["g1"].T) @ w["g2"].T)
    return y, v if first is None else first
