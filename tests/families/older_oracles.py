"""Families that transformers lacks and llama.cpp has, each written down plainly: configs, tensors, logits.

Each `*_logits` is the whole model, in double precision, from its published description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]
IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]
SIZE, VOCAB, HEADS, LAYERS, INNER = 36, 97, 6, 3, 44
USUAL: Config = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GPT: Config = {
    "vocab_size": VOCAB,
    "n_embd": SIZE,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class OlderFamily:
    """`shapes`: of every tensor. `logits`: ids [T] -> [T, vocab] float64."""

    config: Config
    shapes: Callable[[Config], Iterator[tuple[str, tuple[int, ...]]]]
    logits: Callable[[Config, Tensors, Tensor], Tensor]

    def checkpoint(self, config: Config | None = None) -> dict[str, Tensor]:
        """Random tensors, in double precision."""
        made = torch.Generator().manual_seed(1)
        shapes = self.shapes(config or self.config)
        return {
            name: slopes(HEADS)
            if name.endswith("slopes")
            else torch.randn(shape, dtype=torch.float64, generator=made) * 0.2
            + (len(shape) == 1 and name.endswith(("weight", "_g")))  # norms and gains are around 1
            for name, shape in shapes
        }


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes by its paper: of 2^n heads a row of powers; of others every second of the next row."""
    whole = 2 ** (heads.bit_length() - 1)

    def row(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    return torch.tensor((row(whole) + row(2 * whole)[::2])[:heads], dtype=torch.float64)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, base: float = 1e4, *, neighbours: bool = False, dim: int | None = None) -> Tensor:
    """x: [T, heads, d], its first `dim` numbers with rotary positions from 0 on."""
    dim = dim or x.shape[-1]
    x, rest = x[..., :dim], x[..., dim:]
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * base ** (
        -torch.arange(0, dim, 2) / dim
    )
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    both = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    made = torch.stack(both, -1).flatten(-2) if neighbours else torch.cat(both, -1)
    return torch.cat([made, rest], -1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, slope: Tensor | None = None, window: int | None = None
) -> Tensor:
    """q [T, H, d], k and v [T, Hk, d]: [T, H, dv]."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    at = torch.arange(len(q))
    behind = at[:, None] - at
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if slope is not None:
        scores = scores - slope[:, None, None] * behind
    hidden = (behind < 0) | (behind >= (window or len(q)))
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def heads_of(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim))


def _jais_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, inner = c["n_embd"], c["n_inner"]
    yield from (("transformer.wte.weight", (VOCAB, n)), ("lm_head.weight", (VOCAB, n)))
    yield "transformer.relative_pe.slopes", (c["n_head"],)
    norms = [f"transformer.h.{i}.ln_{x}" for i in range(c["n_layer"]) for x in (1, 2)]
    for name in ("transformer.ln_f", *norms):
        yield from ((f"{name}.weight", (n,)), (f"{name}.bias", (n,)))
    for i in range(c["n_layer"]):
        sizes = {"attn.c_attn": (n, 3 * n), "attn.c_proj": (n, n), "mlp.c_proj": (inner, n)}
        sizes |= {"mlp.c_fc": (n, inner), "mlp.c_fc2": (n, inner)}
        for name, shape in sizes.items():
            yield from (
                (f"transformer.h.{i}.{name}.weight", shape),
                (f"transformer.h.{i}.{name}.bias", shape[1:]),
            )


def _jais_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    dim, eps = c["n_embd"] // c["n_head"], c["layer_norm_epsilon"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["transformer.wte.weight"][ids] * c["mup_embeddings_scale"]
    for i in range(c["n_layer"]):
        h = f"transformer.h.{i}"
        q, k, v = heads_of(product(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn"), dim).chunk(3, 1)
        out = attend(q, k, v, 1 / dim, slope=slopes(c["n_head"]))
        x = x + product(out.flatten(1), f"{h}.attn.c_proj")
        y = norm(x, f"{h}.ln_2")
        y = product(y, f"{h}.mlp.c_fc") * F.silu(product(y, f"{h}.mlp.c_fc2"))
        x = x + product(y, f"{h}.mlp.c_proj")
    scale = c["mup_output_alpha"] * c["mup_width_scale"]
    return norm(x, "transformer.ln_f") @ t["lm_head.weight"].T * scale


def _refact_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, dim, inner = c["n_embd"], c["n_embd"] // c["n_head"], 256
    yield from (("transformer.wte.weight", (VOCAB, n)), ("lm_head.weight", (VOCAB, n)))
    yield "transformer.ln_f.weight", (n,)
    for i in range(c["n_layer"]):
        sizes = {"attn.q": (n, n), "attn.kv": (2 * dim, n), "attn.c_proj": (n, n), "ln_1": (n,), "ln_2": (n,)}
        sizes |= {"mlp.gate_up_proj": (2 * inner, n), "mlp.c_proj": (n, inner)}
        yield from ((f"transformer.h.{i}.{name}.weight", shape) for name, shape in sizes.items())


def _refact_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    dim, eps = c["n_embd"] // c["n_head"], c["layer_norm_epsilon"]
    x = t["transformer.wte.weight"][ids]
    for i in range(c["n_layer"]):
        w = {k.removeprefix(f"transformer.h.{i}."): v for k, v in t.items() if f".h.{i}." in k}
        y = F.layer_norm(x, x.shape[-1:], w["ln_1.weight"], None, eps)
        k, v = heads_of(y @ w["attn.kv.weight"].T, dim).chunk(2, 1)
        q = heads_of(y @ w["attn.q.weight"].T, dim)
        out = attend(q, k, v, dim**-0.5, slope=slopes(c["n_head"])).flatten(1)
        x = x + out @ w["attn.c_proj.weight"].T
        y = F.layer_norm(x, x.shape[-1:], w["ln_2.weight"], None, eps)
        gate, up = (y @ w["mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["mlp.c_proj.weight"].T
    last = F.layer_norm(x, x.shape[-1:], t["transformer.ln_f.weight"], None, eps)
    return last @ t["lm_head.weight"].T


def _widths(c: Config) -> list[int]:
    """Multiples of the divisor, of the published rule."""
    found, by = [], c["ffn_dim_divisor"]
    for multiplier in c["ffn_multipliers"]:
        wanted = multiplier * c["model_dim"]
        near = max(by, int(wanted + by / 2) // by * by)
        found.append(near + by if near < 0.9 * wanted else near)
    return found


def _openelm_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, dim = c["model_dim"], c["head_dim"]
    yield from (("transformer.token_embeddings.weight", (VOCAB, n)), ("transformer.norm.weight", (n,)))
    for i, size in enumerate(_widths(c)):
        q, kv = c["num_query_heads"][i] * dim, c["num_kv_heads"][i] * dim
        sizes = {"attn.qkv_proj": (q + 2 * kv, n), "attn.out_proj": (n, q), "ffn.proj_1": (2 * size, n)}
        sizes |= {"attn.q_norm": (dim,), "attn.k_norm": (dim,), "attn_norm": (n,), "ffn_norm": (n,)}
        sizes |= {"ffn.proj_2": (n, size)}
        yield from ((f"transformer.layers.{i}.{name}.weight", shape) for name, shape in sizes.items())


def _openelm_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    dim, eps, table = c["head_dim"], 1e-6, t["transformer.token_embeddings.weight"]
    x = table[ids]
    for i in range(c["num_transformer_layers"]):
        w = {k.removeprefix(f"transformer.layers.{i}."): v for k, v in t.items() if f".layers.{i}." in k}
        qkv = heads_of(rms(x, w["attn_norm.weight"], eps) @ w["attn.qkv_proj.weight"].T, dim)
        q, k, v = qkv.split([c["num_query_heads"][i], *[c["num_kv_heads"][i]] * 2], 1)
        q, k = (
            turned(rms(part, w[f"attn.{name}_norm.weight"], eps), c["rope_freq_constant"])
            for name, part in (("q", q), ("k", k))
        )
        x = x + attend(q, k, v, dim**-0.5).flatten(1) @ w["attn.out_proj.weight"].T
        gate, up = (rms(x, w["ffn_norm.weight"], eps) @ w["ffn.proj_1.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["ffn.proj_2.weight"].T
    return rms(x, t["transformer.norm.weight"], eps) @ table.T


def _llama_shapes(c: Config, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tables, norms and those of one layer, by Llama's names."""
    n = c["hidden_size"]
    yield from (("model.embed_tokens.weight", (VOCAB, n)), ("model.norm.weight", (n,)))
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCAB, n)
    usual = {"input_layernorm": (n,), "post_attention_layernorm": (n,)}
    for i in range(c["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in {**usual, **sizes}.items())


def _layer(t: Tensors, i: int) -> dict[str, Tensor]:
    at = f"model.layers.{i}."
    return {
        k.removeprefix(at).removesuffix(".weight").removeprefix("self_attn."): v
        for k, v in t.items()
        if k.startswith(at)
    }


def _plm_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, turns, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attn = {
        "q_proj": (heads * (nope + turns), n),
        "kv_a_proj_with_mqa": (rank + turns, n),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + v), rank),
        "o_proj": (n, heads * v),
    }
    mlp = {"mlp.up_proj": (c["intermediate_size"], n), "mlp.down_proj": (n, c["intermediate_size"])}
    yield from _llama_shapes(c, {**{f"self_attn.{k}": shape for k, shape in attn.items()}, **mlp})


def _plm_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    nope, turns, eps = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["rms_norm_eps"]
    x, heads = t["model.embed_tokens.weight"][ids], c["num_attention_heads"]
    for i in range(c["num_hidden_layers"]):
        w = _layer(t, i)
        y = rms(x, w["input_layernorm"], eps)
        q = heads_of(y @ w["q_proj"].T, nope + turns)
        latent, shared = (y @ w["kv_a_proj_with_mqa"].T).split([c["kv_lora_rank"], turns], -1)
        up = rms(latent, w["kv_a_layernorm"], 1e-6) @ w["kv_b_proj"].T
        k, v = heads_of(up, nope + c["v_head_dim"]).split([nope, c["v_head_dim"]], -1)
        q = torch.cat([q[..., :nope], turned(q[..., nope:], neighbours=True)], -1)
        k = torch.cat([k, turned(shared[:, None], neighbours=True).expand(-1, heads, -1)], -1)
        x = x + attend(q, k, v, (nope + turns) ** -0.5).flatten(1) @ w["o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        x = x + F.relu(y @ w["mlp.up_proj"].T).square() @ w["mlp.down_proj"].T
    return rms(x, t["model.norm.weight"], eps) @ t["model.embed_tokens.weight"].T


def _spark_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, inner, dim, heads = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["num_attention_heads"]
    sizes = {"self_attn.q_k_v_proj": ((heads + 2 * c["num_key_value_heads"]) * dim, n)}
    sizes |= {"self_attn.o_proj": (n, heads * dim), "self_attn.g_proj": (heads, n)}
    sizes |= {"mlp.gate_proj": (inner, n), "mlp.up_proj": (inner, n), "mlp.down_proj": (n, inner)}
    yield from _llama_shapes(c, sizes)


def _spark_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], c["head_dim"]
    kv = c["num_key_value_heads"]
    for i, kind in enumerate(c["layer_types"]):
        w, turns = _layer(t, i), c["rope_parameters"][kind]
        y = rms(x, w["input_layernorm"], eps)
        q, k, v = heads_of(y @ w["q_k_v_proj"].T, dim).split([c["num_attention_heads"], kv, kv], 1)
        share = int(dim * turns["partial_rotary_factor"])
        q, k = (turned(part, turns["rope_theta"], dim=share) for part in (q, k))
        out = attend(q, k, v, dim**-0.5, window=None if kind[0] == "f" else c["sliding_window"])
        x = x + (out * (y @ w["g_proj"].T).sigmoid()[..., None]).flatten(1) @ w["o_proj"].T
        y = rms(x, w["post_attention_layernorm"], eps)
        x = x + (F.gelu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _nanbeige_shapes(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, inner, dim = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * dim
    sizes = {f"self_attn.{x}_proj": (m, n) for x, m in (("q", n), ("k", kv), ("v", kv), ("o", n))}
    sizes |= {"mlp.gate_proj": (inner, n), "mlp.up_proj": (inner, n), "mlp.down_proj": (n, inner)}
    yield from _llama_shapes(c, sizes)


def _nanbeige_logits(c: Config, t: Tensors, ids: Tensor) -> Tensor:
    x, eps, dim = t["model.embed_tokens.weight"][ids], c["rms_norm_eps"], SIZE // HEADS
    for turn in range(c["num_loops"]):
        if turn and not c["skip_loop_final_norm"]:
            x = rms(x, t["model.norm.weight"], eps)
        for i in range(c["num_hidden_layers"]):
            w = _layer(t, i)
            y = rms(x, w["input_layernorm"], eps)
            q, k, v = (heads_of(y @ w[f"{name}_proj"].T, dim) for name in "qkv")
            x = x + attend(turned(q), turned(k), v, dim**-0.5).flatten(1) @ w["o_proj"].T
            y = rms(x, w["post_attention_layernorm"], eps)
            x = x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


JAIS: Config = {
    **GPT, "architectures": ["JAISLMHeadModel"], "model_type": "jais", "n_inner": INNER,
    "activation_function": "swiglu", "position_embedding_type": "alibi", "mup_embeddings_scale": 1.5,
    "mup_output_alpha": 2.0, "mup_width_scale": 0.375, "mup_scale_qk_dot_by_d": True,
}  # fmt: skip
OPENELM: Config = {
    "architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "vocab_size": VOCAB,
    "model_dim": SIZE, "num_transformer_layers": LAYERS, "num_query_heads": [4, 6, 6],
    "num_kv_heads": [2, 2, 3], "head_dim": 8, "ffn_multipliers": [0.5, 1.35, 2.1], "ffn_dim_divisor": 8,
    "max_context_length": 128, "rope_freq_constant": 10000, "activation_fn_name": "swish",
    "ffn_with_glu": True, "normalize_qk_projections": True, "normalization_layer_name": "rms_norm",
    "share_input_output_layers": True,
}  # fmt: skip
PLM: Config = {
    **USUAL, "architectures": ["PLMForCausalLM"], "model_type": "plm", "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6, "hidden_act": "relu2", "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "tie_word_embeddings": True,
}  # fmt: skip
SPARK: Config = {
    **USUAL, "architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5", "num_hidden_layers": 4,
    "head_dim": 8, "hidden_act": "gelu", "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True,
    "sliding_window": 6, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
NANBEIGE: Config = {
    **USUAL, "architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "hidden_act": "silu",
    "rope_theta": 1e4, "num_loops": 3, "skip_loop_final_norm": False,
}  # fmt: skip
REFACT: Config = {**GPT, "architectures": ["GPTRefactForCausalLM"], "model_type": "gpt_refact"}
OLDER: Mapping[str, OlderFamily] = {
    "jais": OlderFamily(JAIS, _jais_shapes, _jais_logits),
    "refact": OlderFamily(REFACT, _refact_shapes, _refact_logits),
    "openelm": OlderFamily(OPENELM, _openelm_shapes, _openelm_logits),
    "plm": OlderFamily(PLM, _plm_shapes, _plm_logits),
    "spark2_5": OlderFamily(SPARK, _spark_shapes, _spark_logits),
    "nanbeige": OlderFamily(NANBEIGE, _nanbeige_shapes, _nanbeige_logits),
}
