"""Dense transformers that differ from Llama in one thing: an activation, a norm, how positions turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import ConfigError
from plait.families.common.recipes import (
    TEXT_PREFIXES,
    at,
    attention_tensors,
    ends,
    flat,
    join_vectors,
    part,
    plus,
    reorder_rows,
    text_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    build_temperature,
    gqa,
    mlp,
    model,
    norm,
    plain_mlp,
    require,
    side_by_side,
)
from plait.families.config.normalize import FULL, ROPES, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, plain_arch
from plait.families.llama import dense
from plait.quant.weight import as_tensor
from plait.spec.model import ModelSpec, NormSpec

QK = (("q", "query"), ("k", "key"))
SILU = {"norm_eps": 1e-6, "hidden_act": "silu"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@family(
    *("SeedOssForCausalLM", "InternLM3ForCausalLM"),
    model_types=("seed_oss", "internlm3"),
    defaults=SILU,
    honours=("sliding_window",),
)
def llama_kin(c: Config) -> tuple[ModelSpec, NameMap]:
    """Seed-OSS and InternLM 3: Llama with biases, which the checkpoint shows."""
    return dense(c, c["model_type"])


@family(
    "CwmForCausalLM",
    model_types=("cwm",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "sliding_window": 8192,
        "layer_cycle": [FULL, SLIDING, SLIDING, SLIDING],
        "rope_theta": 1e6,
        "rope_parameters": {**LLAMA3, "factor": 16.0},
    },
    honours=("sliding_window",),
)
def cwm(c: Config) -> tuple[ModelSpec, NameMap]:
    """CWM: Llama with windows in three of four layers."""
    return dense(c, "cwm")


@family("ArceeForCausalLM", model_types=("arcee",), defaults={"norm_eps": 1e-5, "hidden_act": "relu2"})
def arcee(c: Config) -> tuple[ModelSpec, NameMap]:
    """AFM 4.5B: a feed-forward without a gate, with a squared ReLU."""
    return dense(c, "arcee", ffn=plain_mlp(c))


@family(
    "HeliumForCausalLM",
    model_types=("helium",),
    defaults={"norm_eps": 1e-8, "hidden_act": "silu", "rope_theta": 1e5, "max_position_embeddings": 4096},
)
def helium(c: Config) -> tuple[ModelSpec, NameMap]:
    """Helium: neighbours of a head turn together."""
    return dense(c, "helium", interleaved=True)


@family(
    *("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    model_types=("ernie4_5",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 5e5, "tie_word_embeddings": True},
)
def ernie(c: Config) -> tuple[ModelSpec, NameMap]:
    """ERNIE 4.5, dense: neighbours of a head turn together."""
    return dense(c, "ernie4_5", interleaved=True)


@family(
    "OlmoForCausalLM",
    model_types=("olmo",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu"},
    honours=("clip_qkv",),
)
def olmo(c: Config) -> tuple[ModelSpec, NameMap]:
    """OLMo 1: layer norms without weights. The 7B models clip queries, keys and values."""
    clip = c.get("clip_qkv")
    each = NormSpec(1e-5, "layer", weight=False)
    return dense(c, "olmo", each=each, clip=float(clip) if clip else None)


@family(
    "NemotronForCausalLM",
    model_types=("nemotron",),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
)
def nemotron(c: Config) -> tuple[ModelSpec, NameMap]:
    """Nemotron 3 and 4, Minitron: layer norms that are stored around 0, a squared ReLU without a gate."""
    layer = "model.layers.{i}"
    stored = {
        "norm.weight": "model.norm.weight",
        "layers.{i}.attn.norm.weight": f"{layer}.input_layernorm.weight",
        "layers.{i}.ffn.norm.weight": f"{layer}.post_attention_layernorm.weight",
    }
    names = {ours: plus(1.0, theirs) for ours, theirs in stored.items()}
    return dense(c, "nemotron", each=norm(c, "layer"), ffn=plain_mlp(c), names=names)


@family(
    "HunYuanDenseV1ForCausalLM",
    model_types=("hunyuan_v1_dense",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "use_qk_norm": True},
    honours=("use_qk_norm",),
)
def hunyuan(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hunyuan 0.5B to 7B: norms of q and k behind the rotation."""
    names = {f"layers.{{i}}.attn.{x}_norm": f"model.layers.{{i}}.self_attn.{y}_layernorm" for x, y in QK}
    qk_norm = norm(c) if c["use_qk_norm"] else None
    return dense(c, "hunyuan_v1_dense", names=names, qk_norm=qk_norm, qk_norm_last=True)


@family("MaincoderForCausalLM", model_types=("maincoder",), defaults={"norm_eps": 1e-5, "hidden_act": "silu"})
def maincoder(c: Config) -> tuple[ModelSpec, NameMap]:
    """Maincoder: norms of q and k behind the rotation, of neighbours in a head."""
    return dense(c, "maincoder", interleaved=True, qk_norm=norm(c), qk_norm_last=True)


@family(
    *("ApertusForCausalLM", "Apertus1p5TextForCausalLM", "Apertus1p5ForConditionalGeneration"),
    model_types=("apertus", "apertus1p5_text", "apertus1p5"),
    defaults={"norm_eps": 1e-5, "hidden_act": "xielu", "rope_theta": 12e6, "qk_norm": True}
    | {"rope_parameters": LLAMA3, "output_vocab_size": None},
    honours=("qk_norm",),
)
def apertus(c: Config) -> tuple[ModelSpec, NameMap]:
    """Apertus: xIELU without a gate, norms of q and k.

    The table of Apertus 1.5 has rows for pictures and sound, too, behind those of words. Its head may leave
    them out, as no reply has them; then no prompt has them here.
    """
    require(c, "Apertus", hidden_act=("xielu",), post_norm=(False,))
    rows, words = c["vocab_size"], c["output_vocab_size"] or c["vocab_size"]
    if not 1 <= words <= rows:
        raise ConfigError(f"output_vocab_size is {words}: a head has 1 to {rows} tokens (vocab_size)")
    c["vocab_size"] = words

    def table(prefix: str) -> Rules:
        layer, act = f"{prefix}layers.{{i}}", f"{prefix}layers.{{i}}.mlp.act_fn"
        names: dict[str, Source] = {
            "layers.{i}.attn.norm": f"{layer}.attention_layernorm",
            "layers.{i}.ffn.norm": f"{layer}.feedforward_layernorm",
            "layers.{i}.ffn.curve": _curve(*(f"{act}.{x}" for x in ("alpha_p", "alpha_n", "beta", "eps"))),
        }
        if words < rows:
            names["embed.weight"] = part(0, (words, rows - words), f"{prefix}embed_tokens.weight")
        return names

    spec, _ = dense(c, "apertus", ffn=plain_mlp(c), qk_norm=norm(c) if c["qk_norm"] else None)
    ignored = unused_patterns(c, r"^(model\.)?(vision|audio)_tokenizer\.")
    return spec, NameMap(at(TEXT_PREFIXES, table), text_tensors(transformer), ignored=ignored)


def _curve(*sources: str) -> Derived:
    """xIELU's four numbers: the file has logarithms of two of them."""

    def made(above: Tensor, below: Tensor, slope: Tensor, edge: Tensor, **_: str) -> Tensor:
        above, below, slope, edge = (as_tensor(x).float().flatten() for x in (above, below, slope, edge))
        return torch.cat([softplus(above), slope + softplus(below), slope, edge])

    back = (
        Back(lambda c: c[:1].expm1().log()),
        Back(lambda c: (c[1:2] - c[2:3]).expm1().log()),
        Back(lambda c: c[2]),
        Back(lambda c: c[3]),
    )
    return Derived(made, sources, back)


@family(
    "Ministral3ForCausalLM",
    model_types=("ministral3",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 128}
    | {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    honours=("sliding_window", "llama_4_scaling_beta"),
)
def ministral3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ministral 3, Devstral 2: queries that grow with their position."""
    return dense(c, "ministral3", temperature=build_temperature(c))


@family("Jais2ForCausalLM", model_types=("jais2",), defaults={"norm_eps": 1e-5, "hidden_act": "relu2"})
def jais2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Jais 2: layer norms and biases, a squared ReLU without a gate."""
    return dense(c, "jais2", each=norm(c, "layer"), ffn=plain_mlp(c))


@family(
    "NanoChatForCausalLM",
    model_types=("nanochat",),
    defaults={"norm_eps": 1e-6, "hidden_act": "relu2", "final_logit_softcapping": 15.0},
    honours=("final_logit_softcapping",),
)
def nanochat(c: Config) -> tuple[ModelSpec, NameMap]:
    """nanochat: norms without weights, one of the embeddings too; heads turn the other way round."""
    each, dim, layer = NormSpec(c["norm_eps"], weight=False), c["head_dim"], "model.layers.{i}"
    names: dict[str, Source] = {
        f"layers.{{i}}.ffn.{x}": f"{layer}.mlp.fc{i}" for i, x in ((1, "up"), (2, "down"))
    }
    for x, who in (("q", "attention"), ("k", "key_value")):
        rows = torch.arange(c[f"num_{who}_heads"] * dim).view(-1, dim).roll(dim // 2, 1).flatten()
        for kind in ("weight", "bias"):
            names[f"layers.{{i}}.attn.{x}.{kind}"] = reorder_rows(rows, f"{layer}.self_attn.{x}_proj.{kind}")
    # Norms follow the rotation, which no norm sees unless it also scales a head.
    last = c[ROPES][FULL]["rope_type"] in ("yarn", "longrope")
    spec, found = dense(
        c, "nanochat", each=each, ffn=plain_mlp(c), names=names, qk_norm=each, qk_norm_last=last
    )
    cap = c["final_logit_softcapping"]
    return replace(spec, embed_norm=each, logit_softcap=float(cap) if cap else None), found


@family(
    *("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    model_types=("stablelm", "stablelm_epoch"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    },
    honours=("use_parallel_residual", "qk_layernorm"),
)
def stablelm(c: Config) -> tuple[ModelSpec, NameMap]:
    """StableLM 2 and Zephyr 3B: layer norms, positions on a quarter of each head.

    The 12B model has attention and feed-forward side by side, and a norm for each head of q and k.
    """
    each, layer, count = norm(c, "layer"), "model.layers.{i}", len(c["layer_types"])
    parallel, norms = c["use_parallel_residual"], bool(c["qk_layernorm"])
    at = "layers.{i}.mix" if parallel else "layers.{i}"
    changes: dict[str, Any] = {"qk_norm": each, "qk_norm_over": "each"} if norms else {}
    names: dict[str, Source] = {
        f"{at}.attn.{x}_norm.weight": join_vectors(
            *(f"{layer}.self_attn.{x}_layernorm.norms.{h}.weight" for h in range(c[f"num_{who}_heads"]))
        )
        for x, who in (("q", "attention"), ("k", "key_value"))
    }
    if not parallel:
        return dense(c, "stablelm", each=each, names=names, **changes)
    names |= {f"{at}.norm": f"{layer}.input_layernorm", f"{at}.ffn.{{x}}": f"{layer}.mlp.{{x}}_proj"}
    names |= attention_tensors(f"{at}.attn", f"{layer}.self_attn")
    spec = model(c, "stablelm", [side_by_side(gqa(c, **changes), mlp(c), each)] * count, norm=each)
    return spec, NameMap(names, ends(), ignored=unused_patterns(c))


def _seed_names(c: Config) -> dict[str, str]:
    return {"layers.{i}.ffn.norm": "blk.{i}.post_attention_norm"}


plain_arch("seed_oss", "SeedOssForCausalLM", names=_seed_names, model_type="seed_oss")
plain_arch("arcee", "ArceeForCausalLM", rope_interleave=True)
plain_arch("ernie4_5", "Ernie4_5ForCausalLM")
plain_arch("olmo", "OlmoForCausalLM", rope_interleave=True)
plain_arch("nemotron", "NemotronForCausalLM")
plain_arch("jais2", "Jais2ForCausalLM")
plain_arch("maincoder", "MaincoderForCausalLM")


def _curve_of(c: Config) -> dict[str, Source]:
    curves = torch.tensor(c["xielu_curves"])
    return {"layers.{i}.ffn.curve": Derived(lambda i, **_: curves[int(i)], ())}


@gguf_arch("apertus", "ApertusForCausalLM", names=_curve_of)
def _apertus_in_gguf(m: Metadata) -> None:
    """The numbers of its curve are metadata: a list for each of the four, without the architecture's name."""
    lists = [m.whole[f"xielu.{x}"] for x in ("alpha_p", "alpha_n", "beta", "eps")]
    above, below, slope, edge = (torch.tensor(one, dtype=torch.float32) for one in lists)
    curves = torch.stack([softplus(above), slope + softplus(below), slope, edge], 1)
    m.put("xielu_curves", curves.tolist(), f"{FILE} xielu")
    m.put("hidden_act", "xielu", "default (the apertus format)")


@gguf_arch("hunyuan-dense", "HunYuanDenseV1ForCausalLM")
def _hunyuan_in_gguf(m: Metadata) -> None:
    m.put("use_qk_norm", any(m.layers("attn_q_norm.weight")), "the tensors of each layer")


@gguf_arch("mistral3", "Ministral3ForCausalLM", constants={"rope_interleave": True})
def _ministral_in_gguf(m: Metadata) -> None:
    """Mistral Small 3, too: its queries do not grow."""
    m.take("llama_4_scaling_beta", "attention.temperature_scale", None)


def _stable_names(c: Config) -> dict[str, Source]:
    at = "layers.{i}.mix.attn" if c["use_parallel_residual"] else "layers.{i}.attn"
    return {f"{at}.{x}_norm.weight": flat(f"blk.{{i}}.attn_{x}_norm.weight") for x, _ in QK}


@gguf_arch("stablelm", "StableLmForCausalLM", names=_stable_names)
def _stable_in_gguf(m: Metadata) -> None:
    m.put("use_parallel_residual", not any(m.layers("ffn_norm.weight")), "the tensors of each layer")
    m.put("qk_layernorm", any(m.layers("attn_q_norm.weight")), "the tensors of each layer")


@gguf_arch("hunyuan_vl", "HunYuanDenseV1ForCausalLM", is_written=False)
def _hunyuan_that_sees(m: Metadata) -> None:
    """Words of a model that also sees: all four positions of a word are one."""
    if alpha := m.values.get("rope.scaling.alpha"):
        dim, base = m.config["head_dim"], m.config.get("rope_theta", 1e4)
        m.put("rope_theta", base * alpha ** (dim / (dim - 2)), f"{FILE} {m.prefix}rope.scaling.alpha")


plain_arch("paddleocr", "LlamaForCausalLM", is_written=False)  # ERNIE's, of which halves of a head turn
# Llama with layer norms, and with biases on all of attention's matrices.
plain_arch("orion", "StableLmForCausalLM", is_written=False, partial_rotary_factor=1.0)
plain_arch("pangu-embedded", "LlamaForCausalLM", is_written=False)
