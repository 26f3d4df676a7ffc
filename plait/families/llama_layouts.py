"""Llama's arithmetic, or nearly, in files with names of their own: MiniCPM, InternLM 2, EXAONE 3, Qwen 1."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import split_grouped_qkv, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, plain_mlp, require
from plait.families.config.normalize import FULL, ROPES, Config
from plait.families.llama import dense
from plait.spec.model import BranchSpec, ModelSpec

ATTN, FFN, H = "layers.{i}.attn", "layers.{i}.ffn", "transformer.h.{i}"
MINICPM = ("scale_emb", "scale_depth", "dim_model_base")
GPT_NAMES: Rules = {
    "embed": "transformer.wte",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    f"{ATTN}.norm": f"{H}.ln_1",
    f"{FFN}.norm": f"{H}.ln_2",
}


@family(
    "MiniCPMForCausalLM",
    model_types=("minicpm",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "sparse_config": None}
    | dict.fromkeys(MINICPM, 1),
    honours=MINICPM,
)
def minicpm(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiniCPM 1, 2, 4 and 4.1: embeddings, branches and logits are scaled.

    Texts shorter than `dense_len`, from which on MiniCPM 4.1 attends to chosen blocks.
    """
    require(c, "MiniCPM", num_experts=(0,))
    spec, names = dense(c, "minicpm")
    scale = c["scale_depth"] / len(spec.layers) ** 0.5
    layers = tuple(tuple(replace(branch, scale=scale) for branch in layer) for layer in spec.layers)
    scales = {"embed_scale": float(c["scale_emb"]), "logit_scale": c["dim_model_base"] / spec.hidden_size}
    sparse, longest = c["sparse_config"], spec.max_len
    if sparse is not None:
        longest = min(longest, (sparse.get("dense_len") or 8192) - 1)
    return replace(spec, layers=layers, max_len=longest, **scales), names


@family("InternLM2ForCausalLM", model_types=("internlm2",), defaults={"norm_eps": 1e-6, "hidden_act": "silu"})
def internlm2(c: Config) -> tuple[ModelSpec, NameMap]:
    """InternLM 2 and 2.5: of each key and value head its queries, its key and its value in one tensor."""
    layer = "model.layers.{i}"
    numbers = {"gate": "w1", "down": "w2", "up": "w3"}
    names: Rules = {
        "embed": "model.tok_embeddings",
        "norm": "model.norm",
        "head": "output",
        f"{ATTN}.norm": f"{layer}.attention_norm",
        f"{FFN}.norm": f"{layer}.ffn_norm",
        f"{ATTN}.o": f"{layer}.attention.wo",
        **{f"{FFN}.{x}": f"{layer}.feed_forward.{w}" for x, w in numbers.items()},
        **split_grouped_qkv(c, ATTN, f"{layer}.attention.wqkv"),
    }
    tied = (r"^output\.weight$",) if c.get("tie_word_embeddings") else ()
    return dense(c, "internlm2")[0], NameMap(names, ignored=unused_patterns(c, *tied))


@family("ExaoneForCausalLM", model_types=("exaone",), defaults={"norm_eps": 1e-5, "hidden_act": "silu"})
def exaone(c: Config) -> tuple[ModelSpec, NameMap]:
    """EXAONE 3, 3.5 and Deep."""
    names: Rules = {
        **GPT_NAMES,
        f"{ATTN}.o": f"{H}.attn.attention.out_proj",
        f"{ATTN}.{{x}}": f"{H}.attn.attention.{{x}}_proj",
        f"{FFN}.gate": f"{H}.mlp.c_fc_0",
        f"{FFN}.up": f"{H}.mlp.c_fc_1",
        f"{FFN}.down": f"{H}.mlp.c_proj",
    }
    return dense(c, "exaone")[0], NameMap(names, ignored=unused_patterns(c, r"\.rotary\.inv_freq$"))


@family("QWenLMHeadModel", model_types=("qwen",), defaults={"norm_eps": 1e-6, "hidden_act": "silu"})
def qwen(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen 1, up to the length it was trained with: beyond it positions and scores are stretched.

    Its config counts the rows of gate and up together.
    """
    layer = (
        BranchSpec("attn", gqa(c), norm(c)),
        BranchSpec("ffn", mlp(c, c["intermediate_size"] // 2), norm(c)),
    )
    names: Rules = {
        **GPT_NAMES,
        f"{ATTN}.o": f"{H}.attn.c_proj",
        f"{FFN}.up": f"{H}.mlp.w1",
        f"{FFN}.gate": f"{H}.mlp.w2",
        f"{FFN}.down": f"{H}.mlp.c_proj",
        **split_qkv(c, ATTN, f"{H}.attn.c_attn"),
    }
    longest = c.get("seq_length") or c["max_position_embeddings"]
    spec = model(c, "qwen", [layer] * len(c["layer_types"]), max_len=longest)
    return spec, NameMap(names, ignored=unused_patterns(c))


@family("OrionForCausalLM", model_types=("orion",), defaults={"norm_eps": 1e-5, "hidden_act": "silu"})
def orion(c: Config) -> tuple[ModelSpec, NameMap]:
    """Orion 14B: layer norms, of which the config speaks as rms_norm_eps."""
    return dense(c, "orion", each=norm(c, "layer"))


@family(
    *("PanguEmbeddedForCausalLM", "XverseForCausalLM", "AquilaModel", "AquilaForCausalLM"),
    *("InternLMForCausalLM", "SkyworkForCausalLM"),
    model_types=("PanguEmbedded", "xverse", "aquila", "internlm", "skywork"),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu"},
)
def pangu(c: Config) -> tuple[ModelSpec, NameMap]:
    """Llama, with biases where the checkpoint has them: openPangu Embedded, XVERSE, InternLM 1 and others."""
    # InternLM's word; dynamic ones stretch beyond the longest sequence only.
    if (rotary := c.get("rotary")) and c.get("rope_theta") is None:
        require(rotary, "InternLM", type=("dynamic", "origin"))
        c[ROPES][FULL]["rope_theta"] = float(rotary.get("base", 1e4))
    return dense(c, "pangu")


@family(
    "YiForCausalLM",
    model_types=("Yi",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "rope_theta": 5e6,
        "max_position_embeddings": 4096,
    },
)
def yi(c: Config) -> tuple[ModelSpec, NameMap]:
    """Yi as first published; later files of it are Llama's."""
    return dense(c, "Yi", names={f"{x}.norm": f"model.layers.{{i}}.ln{n}" for n, x in ((1, ATTN), (2, FFN))})


@family(
    "CodeShellForCausalLM",
    model_types=("codeshell", "kclgpt"),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
)
def codeshell(c: Config) -> tuple[ModelSpec, NameMap]:
    """CodeShell 7B: StarCoder 2's layers in GPT-2's names."""
    c["num_key_value_heads"] = c.get("num_query_groups") or c["num_key_value_heads"]
    each = norm(c, "layer")
    layer = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", plain_mlp(c), each))
    names: Rules = {
        **GPT_NAMES,
        f"{ATTN}.o": f"{H}.attn.c_proj",
        f"{FFN}.up": f"{H}.mlp.c_fc",
        f"{FFN}.down": f"{H}.mlp.c_proj",
        **split_qkv(c, ATTN, f"{H}.attn.c_attn"),
    }
    spec = model(c, "codeshell", [layer] * len(c["layer_types"]), norm=each)
    return spec, NameMap(names, ignored=unused_patterns(c, r"\.rotary_emb\."))
