"""PLaMo 2: state spaces with one step per head in most layers, windowed attention in the others."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import (
    at,
    conv,
    flat,
    negative_exp,
    plus,
    reorder_rows,
    split_gate_up,
    split_qkv,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mamba1, mlp, model, norm
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

# Norms are stored around 0; what is added differs from place to place.
OFFSETS = {"pre_mixer": 1.0, "post_mixer": 1 / 5, "pre_mlp": 1.0, "post_mlp": 1 / 5**1.5}


@family(
    "Plamo2ForCausalLM",
    "PLaMo2ForCausalLM",
    model_types=("plamo2",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "mamba_d_conv": 4,
        "mamba_d_state": 64,
        "mamba_n_heads": 64,
        "mamba_step": 2,
        "attention_window_size": 2048,
        "tie_word_embeddings": True,
    },
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker(("mixer.dt_norm_weight",), order=20),),
        kinds={"mixer.dt_norm_weight": LINEAR, "mixer.qkv_proj.weight": FULL},
    ),
)
def plamo2(c: Config) -> tuple[ModelSpec, NameMap]:
    """PLaMo 2: a norm before and after every mixer and feed-forward; q and k normed head by head."""
    c["mamba_d_ssm"] = c["mamba_n_heads"] * c["head_dim"]
    c["mamba_dt_rank"] = c.get("mamba_dt_rank") or max(64, c["hidden_size"] // 16)
    each = norm(c)
    ssm = mamba1(c, norm=each, num_heads=c["mamba_n_heads"])
    ffn = BranchSpec("ffn", mlp(c), each, each)
    layers = [
        (BranchSpec("ssm", ssm, each, each) if kind == LINEAR else _attention(c, i, each), ffn)
        for i, kind in enumerate(c["layer_types"])
    ]
    names = at(("model.layers.layers", "model.layers"), lambda prefix: _names(c, prefix))
    return model(c, "plamo2", layers), NameMap(names, ignored=unused_patterns(c))


def _attention(c: Config, i: int, each: NormSpec) -> BranchSpec:
    """A query sees itself and as many keys before it as the window says."""
    window = None if i in (c.get("full_attention_idx") or ()) else int(c["attention_window_size"]) + 1
    mixer = gqa(c, window=window, qk_norm=NormSpec(1e-6), qk_norm_over="each")
    return BranchSpec("attn", mixer, each, each)


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}.{{i}}"
    mixer = f"{layer}.mixer"
    return {
        "embed": "model.embed_tokens",
        "norm.weight": plus(1.0, "model.norm.weight"),
        "head": "lm_head",
        "layers.{i}.ffn.norm.weight": plus(OFFSETS["pre_mlp"], f"{layer}.pre_mlp_norm.weight"),
        "layers.{i}.ffn.post_norm.weight": plus(OFFSETS["post_mlp"], f"{layer}.post_mlp_norm.weight"),
        "layers.{i}.{branch}.norm.weight": plus(OFFSETS["pre_mixer"], f"{layer}.pre_mixer_norm.weight"),
        "layers.{i}.{branch}.post_norm.weight": plus(
            OFFSETS["post_mixer"], f"{layer}.post_mixer_norm.weight"
        ),
        **{f"layers.{{i}}.ssm.{x}_norm.weight": f"{mixer}.{x}_norm_weight" for x in ("dt", "B", "C")},
        "layers.{i}.ssm.conv.weight": conv(f"{mixer}.conv1d.weight"),
        "layers.{i}.ssm.A": negative_exp(f"{mixer}.A_log"),
        "layers.{i}.ssm.D": f"{mixer}.D",
        "layers.{i}.ssm.dt.bias": f"{mixer}.dt_bias",
        "layers.{i}.ssm.dt": f"{mixer}.dt_proj",
        "layers.{i}.ssm.out": f"{mixer}.out_proj",
        **_split_mixer(c, f"{mixer}.in_proj", f"{mixer}.bcdt_proj", f"{mixer}.qkv_proj"),
        **{f"layers.{{i}}.attn.{x}_norm.weight": flat(f"{mixer}.{x}_weight") for x in "qk"},
        "layers.{i}.attn.o": f"{mixer}.o_proj",
        "layers.{i}.ffn.down": f"{layer}.mlp.down_proj",
        **split_gate_up("layers.{i}.ffn", f"{layer}.mlp.gate_up_proj"),
    }


def _split_mixer(c: Config, into: str, steps: str, qkv: str) -> dict[str, Source]:
    """What PLaMo stores in one tensor, or in an order of its own."""
    rank, state = c["mamba_dt_rank"], c["mamba_d_state"]
    theirs = torch.arange(2 * state + rank)  # B, C, dt
    return {
        "layers.{i}.ssm.in.weight": reorder_rows(
            _heads_apart(c["mamba_n_heads"], c["head_dim"]), f"{into}.weight"
        ),
        "layers.{i}.ssm.x.weight": reorder_rows(theirs.roll(rank), f"{steps}.weight"),
        **split_qkv(c, "layers.{i}.attn", qkv),
    }


def _heads_apart(heads: int, dim: int) -> Tensor:
    """Rows of the gate and of x, one after the other for each head, as all of x and then all of the gate."""
    rows = torch.arange(2 * heads * dim).view(heads, 2, dim)
    return torch.cat([rows[:, 1].flatten(), rows[:, 0].flatten()])


def _gguf_names(c: Config) -> Rules:
    b = "blk.{i}"
    names: dict[str, Source | tuple[Source, ...]] = {
        "layers.{i}.ssm.norm": f"{b}.attn_norm",
        "layers.{i}.ssm.dt": f"{b}.ssm_dt",
        **_split_mixer(c, f"{b}.ssm_in", f"{b}.ssm_x", f"{b}.attn_qkv"),
        **{f"layers.{{i}}.attn.{x}_norm.weight": flat(f"{b}.attn_{x}_norm.weight") for x in "qk"},
    }
    bare = {f"ssm.{x}_norm": f"{b}.ssm_{x.lower()}_norm" for x in ("dt", "B", "C")}
    bare |= {f"{x}.post_norm": f"{b}.post_attention_norm" for x in ("ssm", "attn")}
    bare["ffn.post_norm"] = f"{b}.post_ffw_norm"
    for ours, theirs in bare.items():  # some of llama.cpp's readers want these without a suffix
        names[f"layers.{{i}}.{ours}.weight"] = (theirs, f"{theirs}.weight")
    return names | split_gate_up("layers.{i}.ffn", f"{b}.ffn_up")


@gguf_arch("plamo2", "Plamo2ForCausalLM", names=_gguf_names)
def _plamo2_gguf(m: Metadata) -> None:
    """The file leaves the window out: what PLaMo 2 was made with is assumed."""
    kinds = [LINEAR if ssm else FULL for ssm in m.layers("ssm_in.weight")]
    m.put("layer_types", kinds, "the tensors of each layer")
    m.size("mamba_dt_rank", "ssm_dt.weight", 1)
