"""Looped families that neither transformers nor llama.cpp has, written down as in `older_oracles`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
    HEADS,
    INNER,
    SIZE,
    USUAL,
    VOCAB,
    Config,
    OlderFamily,
    Tensors,
    attend,
    heads_of,
    rms,
    turned,
)

DIM = 8
Shapes = dict[str, tuple[int, ...]]


def layer_shapes(c: Config, norms: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A model of attention and a gated MLP in Llama's names, with these norms."""
    kv = c["num_key_value_heads"] * DIM
    rows = {"q": HEADS * DIM, "k": kv, "v": kv}
    sizes: Shapes = {f"self_attn.{x}_proj": (n, SIZE) for x, n in rows.items()}
    sizes |= {"self_attn.o_proj": (SIZE, HEADS * DIM), "mlp.down_proj": (SIZE, INNER)}
    sizes |= {f"mlp.{x}_proj": (INNER, SIZE) for x in ("gate", "up")} | dict.fromkeys(norms, (SIZE,))
    yield from (("model.embed_tokens.weight", (VOCAB, SIZE)), ("model.norm.weight", (SIZE,)))
    yield "lm_head.weight", (VOCAB, SIZE)
    for i in range(c["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in sizes.items())


def of_layer(t: Tensors, i: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{i}."
    return {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in t.items() if k.startswith(prefix)}


def project(x: Tensor, w: Tensors) -> list[Tensor]:
    return [heads_of(x @ w[f"self_attn.{name}_proj"].T, DIM) for name in "qkv"]


def feed(x: Tensor, w: Tensors) -> Tensor:
    return (F.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def _ouro_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = [f"{x}_layernorm{end}" for x in ("input", "post_attention") for end in ("", "_2")]
    yield from layer_shapes(c, tuple(names))
    yield from (("model.early_exit_gate.weight", (1, SIZE)), ("model.early_exit_gate.bias", (1,)))


def _ouro_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for _ in range(c["total_ut_steps"]):
        for i, kind in enumerate(c["layer_types"]):
            w = of_layer(t, i)
            q, k, v = project(rms(x, w["input_layernorm"], eps), w)
            window = c["sliding_window"] if kind[0] == "s" else None
            q, k = (turned(part, c["rope_theta"]) for part in (q, k))
            out = attend(q, k, v, DIM**-0.5, window=window).flatten(1) @ w["self_attn.o_proj"].T
            x = x + rms(out, w["input_layernorm_2"], eps)
            y = feed(rms(x, w["post_attention_layernorm"], eps), w)
            x = x + rms(y, w["post_attention_layernorm_2"], eps)
        x = rms(x, t["model.norm.weight"], eps)
    return x @ t["lm_head.weight"].T


def _iquest_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from layer_shapes(c, ("input_layernorm", "post_attention_layernorm"))


def _iquest_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, most = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["clip_qkv"] or torch.inf
    for i in range(c["num_hidden_layers"]):
        w = of_layer(t, i)
        q, k, v = (part.clamp(-most, most) for part in project(rms(x, w["input_layernorm"], eps), w))
        q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
        x = x + attend(q, k, v, DIM**-0.5).flatten(1) @ w["self_attn.o_proj"].T
        x = x + feed(rms(x, w["post_attention_layernorm"], eps), w)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _loop_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _iquest_shapes(c)
    for i in range(c["num_hidden_layers"]):
        yield f"model.gate_projections.{i}.weight", (HEADS, DIM)
        yield f"model.gate_projections.{i}.bias", (HEADS,)


def _loop_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for turn in range(c["loop_num"]):
        for i in range(c["num_hidden_layers"]):
            w, gate = of_layer(t, i), f"model.gate_projections.{i}"
            q, k, v = project(rms(x, w["input_layernorm"], eps), w)
            q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
            far = kept.setdefault(i, (k, v))
            out = attend(q, *far, DIM**-0.5)
            if turn:
                near = attend(q, k, v, DIM**-0.5, window=c["loop_window_size"])
                share = ((q * t[f"{gate}.weight"]).sum(-1) + t[f"{gate}.bias"]).sigmoid()[..., None]
                out = share * out + (1 - share) * near
            x = x + out.flatten(1) @ w["self_attn.o_proj"].T
            x = x + feed(rms(x, w["post_attention_layernorm"], eps), w)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


OURO: Config = {
    **USUAL, "architectures": ["OuroForCausalLM"], "model_type": "ouro", "hidden_act": "silu",
    "head_dim": DIM, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "total_ut_steps": 3,
    "early_exit_threshold": 1.0, "layer_types": ["full_attention"] * 3, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 28, "attention_dropout": 0.0,
}  # fmt: skip
IQUEST: Config = {
    **USUAL, "architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder", "hidden_act": "silu",
    "head_dim": DIM, "rope_theta": 5e5, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
    "clip_qkv": 0.5, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0,
}  # fmt: skip
IQUEST_LOOP: Config = {
    **USUAL, "architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder",
    "hidden_act": "silu", "head_dim": DIM, "rope_theta": 5e5, "rope_scaling": None, "loop_num": 2,
    "loop_window_size": 6, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
LOOPED: Mapping[str, OlderFamily] = {
    "ouro": OlderFamily(OURO, _ouro_shapes, _ouro_logits),
    "iquest": OlderFamily(IQUEST, _iquest_shapes, _iquest_logits),
    "iquest_loop": OlderFamily(IQUEST_LOOP, _loop_shapes, _loop_logits),
}
