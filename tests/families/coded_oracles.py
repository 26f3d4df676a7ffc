"""Families that came with code of their own, written down plainly from it as in `older_oracles`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families.older_oracles import (
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
    slopes,
    turned,
)

HEADS, KV, DIM = 6, 2, SIZE // 6
Shape = tuple[str, tuple[int, ...]]


def _of_layer(t: Tensors, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in t.items() if k.startswith(prefix)}


def _chatglm_shapes(c: Config) -> Iterator[Shape]:
    n, inner, dim = SIZE, c["ffn_hidden_size"], c["kv_channels"]
    kv = c["multi_query_group_num"] if c["multi_query_attention"] else HEADS
    rows = (HEADS + 2 * kv) * dim
    yield "transformer.embedding.word_embeddings.weight", (c["padded_vocab_size"], n)
    yield "transformer.output_layer.weight", (c["padded_vocab_size"], n)
    sizes = {"self_attention.query_key_value": (rows, n), "self_attention.dense": (n, HEADS * dim)}
    sizes |= {"mlp.dense_h_to_4h": (2 * inner, n), "mlp.dense_4h_to_h": (n, inner)}
    layers = [f"transformer.encoder.layers.{i}" for i in range(c["num_layers"])]
    norms = [f"{at}.{x}_layernorm" for at in layers for x in ("input", "post_attention")]
    for name in ("transformer.encoder.final_layernorm", *norms):
        yield f"{name}.weight", (n,)
        if not c["rmsnorm"]:
            yield f"{name}.bias", (n,)
    for at in layers:
        for name, shape in sizes.items():
            yield f"{at}.{name}.weight", shape
            if c["add_bias_linear"] or ("query" in name and c["add_qkv_bias"]):
                yield f"{at}.{name}.bias", shape[:1]


def _chatglm_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    dim, kv, eps = c["kv_channels"], c["multi_query_group_num"], c["layernorm_epsilon"]
    base = 1e4 * (1.0 if c["by_place"] else c["rope_ratio"])
    stretch = c["rope_ratio"] if c["by_place"] else 1.0

    def norm(x: Tensor, name: str) -> Tensor:
        if c["rmsnorm"]:
            return rms(x, t[f"{name}.weight"], eps)
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    def turn(x: Tensor) -> Tensor:
        """Pairs of neighbours, in the first half of each head."""
        width = dim // 2
        freq = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = (torch.arange(len(x), dtype=torch.float64) / stretch)[:, None, None] * freq
        a, b = x[..., :width:2], x[..., 1:width:2]
        both = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.cat([torch.stack(both, -1).flatten(-2), x[..., width:]], -1)

    x = t["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{i}"
        mixed = product(norm(x, f"{at}.input_layernorm"), f"{at}.self_attention.query_key_value")
        if c["multi_query_attention"]:
            q, k, v = heads_of(mixed, dim).split([HEADS, kv, kv], 1)
        else:
            q, k, v = mixed.unflatten(-1, (HEADS, 3 * dim)).chunk(3, -1)
        out = attend(turn(q), turn(k), v, dim**-0.5).flatten(1)
        x = x + product(out, f"{at}.self_attention.dense")
        gate, up = product(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h").chunk(2, -1)
        x = x + product(F.silu(gate) * up, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "transformer.encoder.final_layernorm") @ t["transformer.output_layer.weight"].T


def _baichuan_shapes(c: Config) -> Iterator[Shape]:
    n, inner = SIZE, c["intermediate_size"]
    yield from (("model.embed_tokens.weight", (VOCAB, n)), ("lm_head.weight", (VOCAB, n)))
    yield "model.norm.weight", (n,)
    sizes = {"self_attn.W_pack": (3 * n, n), "self_attn.o_proj": (n, n), "mlp.down_proj": (n, inner)}
    sizes |= {f"mlp.{x}_proj": (inner, n) for x in ("gate", "up")}
    sizes |= {"input_layernorm": (n,), "post_attention_layernorm": (n,)}
    for i in range(c["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in sizes.items())


def _baichuan_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for i in range(c["num_hidden_layers"]):
        w = _of_layer(t, f"model.layers.{i}.")
        packed = rms(x, w["input_layernorm"], eps) @ w["self_attn.W_pack"].T
        q, k, v = packed.unflatten(-1, (3, HEADS, DIM)).unbind(1)
        if is_rotary := c["architectures"] == ["BaiChuanForCausalLM"]:
            q, k = turned(q), turned(k)
        out = attend(q, k, v, DIM**-0.5, slope=None if is_rotary else slopes(HEADS))
        x = x + out.flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        x = x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    head = t["lm_head.weight"]
    if "z_loss_weight" in c:  # Baichuan 2's
        head = F.normalize(head)
    return rms(x, t["model.norm.weight"], eps) @ head.T


def _telechat_shapes(c: Config) -> Iterator[Shape]:
    n, inner, at = SIZE, c["ffn_hidden_size"], "" if c.get("tie_word_embeddings", True) else "transformer."
    kv = c.get("num_key_value_heads") or c["n_head"]
    yield f"{at}word_embeddings.weight", (c["vocab_size"], n)
    if at:
        yield "lm_head.weight", (c["vocab_size"], n)
    norms = [f"h.{i}.{x}_layernorm" for i in range(c["n_layer"]) for x in ("input", "post_attention")]
    norms += ["word_embeddings_layernorm"] if c["embed_layernorm"] else []
    yield from ((f"{at}{name}.weight", (n,)) for name in ("ln_f", *norms))
    sizes = {"self_attention.query": (n, n), "self_attention.key_value": (2 * kv * DIM, n)}
    sizes |= {"self_attention.dense": (n, n), "mlp.down_proj": (n, inner)}
    sizes |= {f"mlp.{x}_proj": (inner, n) for x in ("gate", "up")}
    for i in range(c["n_layer"]):
        for name, shape in sizes.items():
            yield f"{at}h.{i}.{name}.weight", shape
        for name in ("self_attention.dense", "mlp.down_proj"):
            yield f"{at}h.{i}.{name}.bias", (n,)


def _telechat_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    t = {name.removeprefix("transformer."): w for name, w in t.items()}
    eps, length = c["layer_norm_epsilon"], max(len(ids), c["training_seqlen"])
    alpha = max(2 ** math.ceil(math.log(length / c["base_seqlen"], 2) + 1) - 1, 1)
    base = 1e4 * alpha ** (DIM / (DIM - 2))
    table = t["word_embeddings.weight"]
    x = table[ids]
    x = rms(x, t["word_embeddings_layernorm.weight"], eps) if c["embed_layernorm"] else x
    for i in range(c["n_layer"]):
        w = _of_layer(t, f"h.{i}.")
        y = rms(x, w["input_layernorm"], eps)
        k, v = heads_of(y @ w["self_attention.key_value"].T, 2 * DIM).chunk(2, -1)
        q = heads_of(y @ w["self_attention.query"].T, DIM)
        out = attend(turned(q, base), turned(k, base), v, DIM**-0.5).flatten(1)
        x = x + out @ w["self_attention.dense"].T + w["self_attention.dense.bias"]
        y = rms(x, w["post_attention_layernorm"], eps)
        y = F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)
        x = x + y @ w["mlp.down_proj"].T + w["mlp.down_proj.bias"]
    return rms(x, t["ln_f.weight"], eps) @ t.get("lm_head.weight", table).T


def _llama_shapes(c: Config) -> Iterator[Shape]:
    n, inner, kv = SIZE, c["intermediate_size"], c["num_key_value_heads"] * DIM
    yield from (("model.embed_tokens.weight", (VOCAB, n)), ("lm_head.weight", (VOCAB, n)))
    yield "model.norm.weight", (n,)
    sizes = {f"self_attn.{x}_proj": (m, n) for x, m in (("q", n), ("k", kv), ("v", kv), ("o", n))}
    sizes |= {"mlp.gate_proj": (inner, n), "mlp.up_proj": (inner, n), "mlp.down_proj": (n, inner)}
    norms = {"input_layernorm": (n,), "post_attention_layernorm": (n,)}
    for i in range(c["num_hidden_layers"]):
        for name, shape in {**sizes, **norms}.items():
            yield f"model.layers.{i}.{name}.weight", shape


def _llama_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    """Llama with muP's scales (TeleFLM) or with connections over several layers (Solar)."""
    x, eps = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    x = x * c["input_mult"] if c.get("use_mup") else x
    first = second = x
    for i in range(c["num_hidden_layers"]):
        if "bskcn_tv" in c:
            share = c["bskcn_tv"][1]
            first = x if i in c["bskcn_1"] else first
            second = x if i in c["bskcn_2"] else second
            x = share * first + (1 - share) * x if i in c["bskcn_3"] else x
            x = share * second + (1 - share) * x if i in c["bskcn_4"] else x
        w = _of_layer(t, f"model.layers.{i}.")
        y = rms(x, w["input_layernorm"], eps)
        q, k, v = (heads_of(y @ w[f"self_attn.{name}_proj"].T, DIM) for name in "qkv")
        x = x + attend(turned(q), turned(k), v, DIM**-0.5).flatten(1) @ w["self_attn.o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        x = x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    logits = rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T
    return logits * c["output_mult"] / c["mup_scale_factor"] if c.get("use_mup") else logits


# `by_place`, which no config has: whether the ratio divides positions, as in ChatGLM 2 (32K).
CHATGLM: Config = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 3, "hidden_size": SIZE,
    "padded_vocab_size": VOCAB, "ffn_hidden_size": INNER, "kv_channels": 8, "num_attention_heads": HEADS,
    "seq_length": 128, "layernorm_epsilon": 1e-5, "rmsnorm": False, "add_bias_linear": True,
    "add_qkv_bias": False, "multi_query_attention": False, "multi_query_group_num": 1, "rope_ratio": 1.0,
    "apply_residual_connection_post_layernorm": False, "original_rope": True, "post_layer_norm": True,
    "tie_word_embeddings": False, "by_place": False,
}  # fmt: skip
BAICHUAN: Config = {
    **USUAL, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_act": "silu",
    "num_key_value_heads": HEADS, "model_max_length": 128, "z_loss_weight": 0,
}  # fmt: skip
TELECHAT: Config = {
    "architectures": ["TelechatForCausalLM"], "model_type": "telechat", "vocab_size": VOCAB, "n_head": HEADS,
    "hidden_size": SIZE, "n_layer": 3, "ffn_hidden_size": INNER, "layer_norm_epsilon": 1e-5, "logn": False,
    "num_key_value_heads": KV, "training_seqlen": 128, "base_seqlen": 64, "embed_layernorm": False,
    "tie_word_embeddings": False, "apply_residual_connection_post_layernorm": False,
}  # fmt: skip
TELEFLM: Config = {
    **USUAL, "architectures": ["TeleFLMForCausalLM"], "model_type": "TeleFLM", "hidden_act": "silu",
    "rope_theta": 1e4, "use_mup": True, "input_mult": 1.5, "output_mult": 3.0, "mup_scale_factor": 4.0,
}  # fmt: skip
SOLAR: Config = {
    **USUAL, "architectures": ["SolarForCausalLM"], "model_type": "solar", "hidden_act": "silu",
    "num_hidden_layers": 7, "rope_theta": 1e4, "sliding_window": 5, "bskcn_1": [1, 4], "bskcn_2": [2, 4],
    "bskcn_3": [3, 5], "bskcn_4": [5, 6], "bskcn_tv": [0.9, 0.8],
}  # fmt: skip
CODED: Mapping[str, OlderFamily] = {
    "chatglm_plain": OlderFamily(CHATGLM, _chatglm_shapes, _chatglm_logits),
    "baichuan2": OlderFamily(BAICHUAN, _baichuan_shapes, _baichuan_logits),
    "telechat": OlderFamily(TELECHAT, _telechat_shapes, _telechat_logits),
    "teleflm": OlderFamily(TELEFLM, _llama_shapes, _llama_logits),
    "solar": OlderFamily(SOLAR, _llama_shapes, _llama_logits),
}
