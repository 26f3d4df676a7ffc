"""RWKV-6, written down plainly from its published code and from that of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]
HIDDEN, HEADS, VOCAB = 30, 3, 97
PUBLISHED: Config = {
    "architectures": ["Rwkv6ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_rwkv6.Rwkv6ForCausalLM"},
    "model_type": "rwkv6",
    "model_version": "6_0",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "attention_hidden_size": HIDDEN,
    "num_attention_heads": 64,  # what the files say, whatever the number of heads
    "num_hidden_layers": 3,
    "head_size": 10,
    "head_size_divisor": 8,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-3,
    "rescale_every": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}
FIVE: Config = {
    **PUBLISHED,
    "architectures": ["RwkvForCausalLM"],
    "model_type": "rwkv5",
    "model_version": "5_2",
}
FLA: Config = {
    "architectures": ["RWKV6ForCausalLM"],
    "model_type": "rwkv6",
    "attn": None,
    "attn_mode": "chunk",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_heads": HEADS,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "hidden_ratio": 3.5,
    "intermediate_size": None,
    "hidden_act": "sqrelu",
    "proj_low_rank_dim": 5,
    "gate_low_rank_dim": 7,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NAMES = {  # in a layer of flash-linear-attention: as published
    "attn_norm": "ln1",
    "ffn_norm": "ln2",
    "attn.g_norm": "attention.ln_x",
    "attn.r_proj.linear": "attention.receptance",
    "attn.k_proj.linear": "attention.key",
    "attn.v_proj.linear": "attention.value",
    "attn.g_proj.linear": "attention.gate",
    "attn.o_proj": "attention.output",
    "ffn.key.linear": "feed_forward.key",
    "ffn.value": "feed_forward.value",
    "ffn.receptance.linear": "feed_forward.receptance",
}


def _sizes(c: Config) -> tuple[int, int, int, int, int]:
    """Channels of all keys, of all values, of the feed-forward; ranks of shares and of decays."""
    if c is FLA or "num_heads" in c:
        inner = -(-int(HIDDEN * c["hidden_ratio"]) // 32) * 32
        keys, values = int(HIDDEN * c["expand_k"]), int(HIDDEN * c["expand_v"])
        return keys, values, inner, c["proj_low_rank_dim"], c["gate_low_rank_dim"]
    size = c["attention_hidden_size"]
    return size, size, int(HIDDEN * 3.5) // 32 * 32, 32, 64


def _vectors(names: Iterator[str] | list[str], *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, shape) for name in names)


def _layer_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys, values, inner, shares, decays = _sizes(c)
    n, own = HIDDEN, "num_heads" not in c
    heads = HEADS if not own else values // c["head_size"]
    rows = {"attn.r_proj.linear": (keys, n), "attn.k_proj.linear": (keys, n)}
    rows |= {"attn.v_proj.linear": (values, n), "attn.g_proj.linear": (values, n), "attn.o_proj": (n, values)}
    rows |= {"ffn.key.linear": (inner, n), "ffn.value": (n, inner), "ffn.receptance.linear": (n, n)}
    for name, shape in rows.items():
        yield f"{NAMES[name] if own else name}.weight", shape
    for name, size in (("attn_norm", n), ("ffn_norm", n), ("attn.g_norm", values)):
        for end in ("weight", "bias"):
            yield f"{NAMES[name] if own else name}.{end}", (size,)
    if c["model_type"] == "rwkv5":
        mixed = [f"attention.time_mix_{x}" for x in ("key", "value", "receptance", "gate")]
        yield from _vectors([*mixed, *(f"feed_forward.time_mix_{x}" for x in ("key", "receptance"))], 1, 1, n)
        yield from _vectors([f"attention.time_{x}" for x in ("decay", "faaaa")], heads, keys // heads)
        return
    if own:
        yield from _vectors([f"attention.time_maa_{x}" for x in "xwkvrg"], 1, 1, n)
        yield from _vectors([f"feed_forward.time_maa_{x}" for x in "kr"], 1, 1, n)
        yield from (("attention.time_maa_w1", (n, 5 * shares)), ("attention.time_maa_w2", (5, shares, n)))
        yield from (("attention.time_decay", (1, 1, keys)), ("attention.time_decay_w1", (n, decays)))
        yield from (
            ("attention.time_decay_w2", (decays, keys)),
            ("attention.time_faaaa", (heads, keys // heads)),
        )
        return
    yield from (("ffn.key.mu", (n,)), ("ffn.receptance.mu", (n,)), ("attn.x_bias", (5, n)))
    yield from (("attn.x_proj.0.mu", (n,)), ("attn.x_proj.0.linear.weight", (5 * shares, n)))
    yield from (("attn.x_proj.2.weight", (n, 5 * shares)), ("attn.bonus", (heads, keys // heads)))
    low = "attn.w_proj.linear.lora"
    yield from (
        (f"{low}.0.weight", (decays, n)),
        (f"{low}.2.weight", (keys, decays)),
        (f"{low}.2.bias", (keys,)),
    )


def checkpoint(c: Config) -> Tensors:
    """Random tensors under published names, in double precision."""
    torch.manual_seed(1)
    own, made = "num_heads" not in c, Tensors()
    ends = ("rwkv.embeddings", "head", "rwkv.ln_out", "rwkv.blocks.0.pre_ln")
    ends = ends if own else ("model.embeddings", "lm_head", "model.norm", "model.layers.0.pre_norm")
    shapes = [(f"{name}.weight", (VOCAB, HIDDEN)) for name in ends[:2]]
    shapes += [(f"{name}.{end}", (HIDDEN,)) for name in ends[2:] for end in ("weight", "bias")]
    for i in range(c["num_hidden_layers"]):
        at = f"rwkv.blocks.{i}" if own else f"model.layers.{i}"
        shapes += [(f"{at}.{name}", shape) for name, shape in _layer_shapes(c)]
    for name, shape in shapes:
        made[name] = torch.randn(shape, dtype=torch.float64) * (0.2 if len(shape) == 2 else 0.3)
        if name.endswith(
            ("ln1.weight", "ln2.weight", "ln_x.weight", "ln_out.weight", "norm.weight", "pre_ln.weight")
        ):
            made[name] += 1
    return made


def logits(c: Config, t: Tensors, ids: Tensor, halves: int = 0) -> Tensor:
    """ids: [T] -> [T, vocab] float64. `halves`: x is halved behind so many layers, as in llama.cpp."""
    return _fla_logits(c, t, ids) if "num_heads" in c else _published_logits(c, t, ids, halves)


def _norm(x: Tensor, t: Tensors, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)


def _change(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]]) - x


def _recur(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """r, k, decay: [T, H, K], v: [T, H, V]; decay before both exponentials -> [T, H, V]."""
    state = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64)
    ys = []
    for n in range(len(r)):
        own = k[n][:, :, None] * v[n][:, None, :]
        ys.append(((state + bonus[:, :, None] * own) * r[n][:, :, None]).sum(1))
        state = torch.exp(-torch.exp(decay[n]))[:, :, None] * state + own
    return torch.stack(ys)


def _shared(x: Tensor, t: Tensors, name: str) -> Tensor:
    """What RWKV-5 stores is the share of the token itself."""
    share, last = t[name][0, 0], torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return x * share + last * (1 - share)


def _moved(x: Tensor, t: Tensors, at: str) -> tuple[Tensor, ...]:
    """RWKV-6's decays before exponentials, and what keys, values, receptances and gates are made of."""
    change = _change(x)
    low = torch.tanh((x + change * t[f"{at}.time_maa_x"][0, 0]) @ t[f"{at}.time_maa_w1"])
    moved = torch.bmm(low.view(len(x), 5, -1).transpose(0, 1), t[f"{at}.time_maa_w2"])
    w, *others = (
        x + change * (t[f"{at}.time_maa_{z}"][0, 0] + m) for z, m in zip("wkvrg", moved, strict=True)
    )
    w = t[f"{at}.time_decay"][0] + torch.tanh(w @ t[f"{at}.time_decay_w1"]) @ t[f"{at}.time_decay_w2"]
    return w, *others


def _published_logits(c: Config, t: Tensors, ids: Tensor, halves: int) -> Tensor:
    eps, size = c["layer_norm_epsilon"], c["head_size"]
    every = halves or c["num_hidden_layers"] + 1
    x = _norm(t["rwkv.embeddings.weight"][ids], t, "rwkv.blocks.0.pre_ln", eps)
    for i in range(c["num_hidden_layers"]):
        at = f"rwkv.blocks.{i}.attention"
        h = _norm(x, t, f"rwkv.blocks.{i}.ln1", eps)
        if c["model_type"] == "rwkv5":
            k, v, r, g = (_shared(h, t, f"{at}.time_mix_{z}") for z in ("key", "value", "receptance", "gate"))
            w = t[f"{at}.time_decay"].expand(len(ids), -1, -1).flatten(1)
        else:
            w, k, v, r, g = _moved(h, t, at)
        linear = {"receptance": r, "key": k, "value": v}
        r, k, v = ((y @ t[f"{at}.{name}.weight"].T).unflatten(1, (-1, size)) for name, y in linear.items())
        y = _recur(r, k, v, w.unflatten(1, (-1, size)), t[f"{at}.time_faaaa"]).flatten(1)
        ends = (t[f"{at}.ln_x.weight"], t[f"{at}.ln_x.bias"])
        y = F.group_norm(y, y.shape[1] // size, *ends, eps=1e-5 * c["head_size_divisor"] ** 2)
        y = (y * F.silu(g @ t[f"{at}.gate.weight"].T)) @ t[f"{at}.output.weight"].T
        x = x + y / 2 ** (i // every)
        at = f"rwkv.blocks.{i}.feed_forward"
        h = _norm(x, t, f"rwkv.blocks.{i}.ln2", eps)
        if c["model_type"] == "rwkv5":
            k, r = (_shared(h, t, f"{at}.time_mix_{z}") for z in ("key", "receptance"))
        else:
            k, r = (h + _change(h) * t[f"{at}.time_maa_{z}"][0, 0] for z in "kr")
        y = (k @ t[f"{at}.key.weight"].T).relu().square() @ t[f"{at}.value.weight"].T
        x = x + torch.sigmoid(r @ t[f"{at}.receptance.weight"].T) * y / 2 ** (i // every)
        x = x / 2 if (i + 1) % every == 0 else x
    return _norm(x, t, "rwkv.ln_out", eps if halves else 1e-5) @ t["head.weight"].T


def _fla_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    eps, heads = c["norm_eps"], c["num_heads"]
    x = _norm(t["model.embeddings.weight"][ids], t, "model.layers.0.pre_norm", eps)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}.attn"
        h = _norm(x, t, f"model.layers.{i}.attn_norm", eps)
        delta = _change(h)
        low = (h + delta * t[f"{at}.x_proj.0.mu"]) @ t[f"{at}.x_proj.0.linear.weight"].T
        low = torch.tanh(low.view(len(ids), 5, -1))
        wide = t[f"{at}.x_proj.2.weight"].view(HIDDEN, 5, -1)
        mu = torch.einsum("tnr,hnr->tnh", low, wide) + t[f"{at}.x_bias"]
        r, w, k, v, g = (h + delta * mu[:, n] for n in range(5))
        r, k, v, g = (
            y @ t[f"{at}.{name}_proj.linear.weight"].T for name, y in (("r", r), ("k", k), ("v", v), ("g", g))
        )
        lora = f"{at}.w_proj.linear.lora"
        w = torch.tanh(w @ t[f"{lora}.0.weight"].T) @ t[f"{lora}.2.weight"].T + t[f"{lora}.2.bias"]
        r, k, v, w = (y.unflatten(1, (heads, -1)) for y in (r, k, v, w))
        y = _recur(r, k, v, w, t[f"{at}.bonus"]).flatten(1)
        y = F.group_norm(y, heads, t[f"{at}.g_norm.weight"], t[f"{at}.g_norm.bias"], eps=eps)
        x = x + (y * F.silu(g)) @ t[f"{at}.o_proj.weight"].T
        at = f"model.layers.{i}.ffn"
        h = _norm(x, t, f"model.layers.{i}.ffn_norm", eps)
        k, r = (h + _change(h) * t[f"{at}.{name}.mu"] for name in ("key", "receptance"))
        y = (k @ t[f"{at}.key.linear.weight"].T).relu().square() @ t[f"{at}.value.weight"].T
        x = x + torch.sigmoid(r @ t[f"{at}.receptance.linear.weight"].T) * y
    return _norm(x, t, "model.norm", eps) @ t["lm_head.weight"].T
