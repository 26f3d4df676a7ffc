"""PLaMo 3: attention with windows in most layers, norms before and behind every mixer."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import at, plus, split_gate_up, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.families.plamo2 import OFFSETS
from plait.spec.model import BranchSpec, ModelSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"


def _infer_sizes(t: Tensors) -> None:
    """Of queries, keys and values in one tensor: the outputs are as many as queries."""
    norm, out, qkv = (t.need(f"mixer.{x}.weight") for x in ("q_norm", "o_proj", "qkv_proj"))
    t.size("head_dim", dim := norm[1][-1], norm)
    t.size("num_attention_heads", out[1][-1] // dim, out)
    t.size("num_key_value_heads", (qkv[1][0] - out[1][-1]) // (2 * dim), qkv)


@family(
    *("Plamo3ForCausalLM", "PLaMo3ForCausalLM"),
    model_types=("plamo3",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "head_dim": 128, "sliding_window": 2048}
    | {"sliding_window_pattern": 8, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000},
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker(("mixer.qkv_proj.weight", "mixer.q_norm.weight"), order=19),),
        kinds={"mixer.qkv_proj.weight": FULL},
        sizes=_infer_sizes,
    ),
)
def plamo3(c: Config) -> tuple[ModelSpec, NameMap]:
    """PLaMo 3: as PLaMo 2 without its state spaces; one weight norms the queries of all heads."""
    each, size = norm(c), c.get("window_size") or c["sliding_window"]
    if isinstance(size, list):  # one for each layer, null where there is none
        size = next(filter(None, size), 0)
    c["sliding_window"] = size
    attns = {kind: gqa(c, kind, qk_norm=each) for kind in (SLIDING, FULL)}
    ffn = BranchSpec("ffn", mlp(c), each, each)
    layers = [(BranchSpec("attn", attns[kind], each, each), ffn) for kind in c["layer_types"]]
    names = at(("model.layers.layers", "model.layers"), lambda prefix: _names(c, f"{prefix}.{{i}}"))
    return model(c, "plamo3", layers), NameMap(names, ignored=unused_patterns(c))


def _names(c: Config, layer: str) -> Rules:
    return {
        "embed": "model.embed_tokens",
        "norm.weight": plus(1.0, "model.norm.weight"),
        "head": "lm_head",
        f"{ATTN}.norm.weight": plus(OFFSETS["pre_mixer"], f"{layer}.pre_mixer_norm.weight"),
        f"{ATTN}.post_norm.weight": plus(OFFSETS["post_mixer"], f"{layer}.post_mixer_norm.weight"),
        f"{FFN}.norm.weight": plus(OFFSETS["pre_mlp"], f"{layer}.pre_mlp_norm.weight"),
        f"{FFN}.post_norm.weight": plus(OFFSETS["post_mlp"], f"{layer}.post_mlp_norm.weight"),
        **{f"{ATTN}.{x}_norm.weight": plus(1.0, f"{layer}.mixer.{x}_norm.weight") for x in "qk"},
        f"{ATTN}.o": f"{layer}.mixer.o_proj",
        f"{FFN}.down": f"{layer}.mlp.down_proj",
        **_split_fused(c, f"{layer}.mixer.qkv_proj", f"{layer}.mlp.gate_up_proj"),
    }


def _split_fused(c: Config, qkv: str, gate_up: str) -> Rules:
    return {**split_qkv(c, ATTN, qkv), **split_gate_up(FFN, gate_up)}


@gguf_arch(
    "plamo3", "Plamo3ForCausalLM", names=lambda c: _split_fused(c, "blk.{i}.attn_qkv", "blk.{i}.ffn_up")
)
def _plamo3_gguf(m: Metadata) -> None:
    windows(m, 8)
    if base := m.values.get("rope.freq_base_swa"):
        m.put("rope_local_base_freq", base, f"{FILE} {m.prefix}rope.freq_base_swa")
