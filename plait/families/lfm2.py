"""LFM2 and LFM2-MoE: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import HfConfig, Values, first_dense
from plait.families.common.recipes import attention_tensors, conv, ends, expert, expert_half, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import check_shares, gqa, model, norm
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec
from plait.spec.recurrent import ShortConvSpec

L = "model.layers.{i}"
DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 1e6, "conv_L_cache": 3, "tie_word_embeddings": True}
POSITIONS = r"\.pos_emb\.inv_freq$"  # what the rope of early files was computed from
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


BIAS = "feed_forward.expert_bias"


def _hf_dense_layers(config: Config, spec: ModelSpec) -> Values:
    return {"num_dense_layers": first_dense(config, spec)["first_k_dense_replace"]}


@family(
    "Lfm2ForCausalLM",
    model_types=("lfm2",),
    defaults={
        **DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    detection=Detection(
        markers=(Marker(("conv.in_proj.weight", "operator_norm.weight"), order=220),),
        kinds={"conv.in_proj.weight": "conv"},
        usual={"rope_theta": 1e6, "max_position_embeddings": 128_000},
    ),
    hf=HfConfig(words={"norm_eps": "norm_eps"}),
)
def lfm2(c: Config) -> tuple[ModelSpec, NameMap]:
    """LFM2: dense feed-forwards. Their width follows from the config's by LLaMA's rule."""
    ffn = BranchSpec("ffn", MlpSpec(_ffn_size(c)), norm(c))
    spec = model(c, "lfm2", [(_mixer(c, kind), ffn) for kind in c["layer_types"]])
    return spec, NameMap(_names(c), ends(), ignored=unused_patterns(c, POSITIONS))


def _ffn_size(c: Config) -> int:
    """Two thirds of the width, times a factor, rounded up to a multiple."""
    size = int(c.get("block_ff_dim") or c["intermediate_size"])
    if not c["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if c["block_ffn_dim_multiplier"] is None:
        return size
    multiple = int(c["block_multiple_of"])
    return multiple * -(-int(c["block_ffn_dim_multiplier"] * size) // multiple)


@family(
    "Lfm2MoeForCausalLM",
    model_types=("lfm2_moe",),
    defaults={
        **DEFAULTS,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    detection=Detection(
        markers=(Marker(("feed_forward.gate.weight", "ffn_norm.weight", "operator_norm.weight"), order=210),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 128_000},
        fill=lambda t: t.put("use_expert_bias", t.has(BIAS), f"whether the tensor {BIAS} is there"),
    ),
    hf=HfConfig(words={"norm_eps": "norm_eps"}, extra=_hf_dense_layers),
)
def lfm2_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """LFM2-MoE: dense in the first layers, then experts chosen by sigmoids and a bias."""
    each = norm(c)
    router = RouterSpec("sigmoid", bool(c["norm_topk_prob"]), 1e-6, float(c["routed_scaling_factor"]))
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], MlpSpec(c["moe_intermediate_size"]), router)
    ffn = {
        "dense": BranchSpec("ffn", MlpSpec(c["intermediate_size"]), each),
        "sparse": BranchSpec("ffn", moe, each),
    }
    pairs = zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    spec = model(c, "lfm2_moe", [(_mixer(c, kind), ffn[width]) for kind, width in pairs])
    unread = () if c["use_expert_bias"] else (r"\.feed_forward\.expert_bias$",)
    return spec, NameMap(_expert_names(c), _names(c), ends(), ignored=unused_patterns(c, POSITIONS, *unread))


@family(
    "Lfm3ForCausalLM",
    model_types=("lfm3",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_theta": 1e6,
        "layer_cycle": [SLIDING, "conv", FULL, "conv"],
        "first_layers": ["conv"],
        "tie_word_embeddings": True,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    honours=("sliding_window", "partial_rotary_factor"),
)
def lfm3(c: Config) -> tuple[ModelSpec, NameMap]:
    """LFM3: short convolutions, windows and whole layers; a gate for each head, norms behind the mixers."""
    check_shares(c, "LFM3")
    each, behind = norm(c), norm(c) if c["use_sandwich_norm"] else None
    gated = "sigmoid" if c["use_attention_gate"] else None
    ffn = BranchSpec("ffn", MlpSpec(c["intermediate_size"]), each, behind)
    mixers = {
        kind: BranchSpec("attn", gqa(c, kind, qk_norm=each, head_gate=gated), each, behind)
        for kind in (FULL, SLIDING)
    }
    mixers["conv"] = BranchSpec("conv", ShortConvSpec(c["conv_L_cache"]), each, behind)
    names: Rules = {
        "layers.{i}.ffn.post_norm": f"{L}.post_ffn_norm",
        "layers.{i}.{branch}.post_norm": f"{L}.post_operator_norm",
        "layers.{i}.attn.head_gate": (f"{L}.self_attn.g_proj", f"{L}.self_attn.gate_proj"),
        "layers.{i}.attn.o": f"{L}.self_attn.o_proj",
        **{f"layers.{{i}}.attn.{x}_norm": f"{L}.self_attn.{x}_norm" for x in ("q", "k")},
    }
    spec = model(c, "lfm3", [(mixers[kind], ffn) for kind in c["layer_types"]])
    return spec, NameMap(names, _names(c), ends(), ignored=unused_patterns(c))


def _mixer(c: Config, kind: str) -> BranchSpec:
    each = norm(c)
    if kind == FULL:
        return BranchSpec("attn", gqa(c, qk_norm=each), each)
    return BranchSpec("conv", ShortConvSpec(c["conv_L_cache"]), each)


def _names(c: Config) -> Rules:
    return {
        "norm": "model.embedding_norm",
        "layers.{i}.ffn.norm": f"{L}.ffn_norm",
        "layers.{i}.{branch}.norm": f"{L}.operator_norm",
        **{f"layers.{{i}}.attn.{x}_norm": f"{L}.self_attn.{x}_layernorm" for x in ("q", "k")},
        "layers.{i}.attn.o": f"{L}.self_attn.out_proj",
        **attention_tensors("layers.{i}.attn", f"{L}.self_attn"),
        "layers.{i}.conv.conv.weight": conv(f"{L}.conv.conv.weight"),
        "layers.{i}.conv.conv.bias": f"{L}.conv.conv.bias",
        "layers.{i}.conv.{x}": f"{L}.conv.{{x}}_proj",
        **{f"layers.{{i}}.ffn.{ours}": f"{L}.feed_forward.{theirs}" for ours, theirs in PARTS.items()},
    }


def _expert_names(c: Config) -> Rules:
    count, ours, theirs = c["num_experts"], "layers.{i}.ffn", f"{L}.feed_forward"
    stacked: dict[str, Source] = {
        "gate": expert_half(0, count, f"{theirs}.experts.gate_up_proj"),
        "up": expert_half(1, count, f"{theirs}.experts.gate_up_proj"),
        "down": expert(count, f"{theirs}.experts.down_proj"),
    }
    return {
        f"{ours}.router": f"{theirs}.gate",
        **({f"{ours}.router_bias": f"{theirs}.expert_bias"} if c["use_expert_bias"] else {}),
        **{
            f"{ours}.experts.{{e}}.{x}.weight": (f"{theirs}.experts.{{e}}.{PARTS[x]}.weight", whole)
            for x, whole in stacked.items()
        },
    }


def _gguf_names(c: Config) -> Rules:
    b = "blk.{i}"
    return {
        "norm": ("token_embd_norm", "output_norm"),
        "layers.{i}.conv.norm": f"{b}.attn_norm",
        "layers.{i}.conv.conv.weight": conv(f"{b}.shortconv.conv.weight"),
        "layers.{i}.conv.conv.bias": f"{b}.shortconv.conv.bias",
        "layers.{i}.conv.{x}": f"{b}.shortconv.{{x}}_proj",
    }


def _kinds(m: Metadata) -> None:
    kinds = ["conv" if short else FULL for short in m.layers("shortconv.in_proj.weight")]
    m.put("layer_types", kinds, "the tensors of each layer")
    m.take("conv_L_cache", "shortconv.l_cache")


gguf_arch("lfm2", "Lfm2ForCausalLM", constants={"block_auto_adjust_ff_dim": False}, names=_gguf_names)(_kinds)


@gguf_arch("lfm2moe", "Lfm2MoeForCausalLM", names=_gguf_names)
def _moe_gguf(m: Metadata) -> None:
    _kinds(m)
    if (kind := m.values.get("expert_gating_func", 2)) != 2:
        raise UnsupportedModel(
            f"{m.prefix}expert_gating_func {kind} is not known for LFM2; known: 2, sigmoid"
        )
