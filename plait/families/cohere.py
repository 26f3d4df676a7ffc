"""Command R and its successors: attention and feed-forward side by side behind one layer norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import SECOND_NORM, Detection, Marker, Q, has_rope
from plait.families.common.hf_config import HfConfig
from plait.families.common.recipes import ends, expert_tensors, flat, scale_tensor, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.spec.model import (
    AttentionSpec,
    BranchSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ParallelSpec,
    RouterSpec,
)

MIX, L = "layers.{i}.mix", "model.layers.{i}"
NO_RULES: Rules = {}
SHARED = {"norm_eps": 1e-5, "hidden_act": "silu", "logit_scale": 0.0625, "tie_word_embeddings": True}


def _is_command_a(t: Tensors) -> bool:
    """Of the large models without norms of q and k, it is the only one; R+ has them."""
    return bool(t.get("hidden_size") == 12288)


# hidden size, key and value heads -> (rope theta, what logits are multiplied by, longest sequence, model)
COHERE: Mapping[tuple[int, int], tuple[float, float, int, str]] = {
    (12288, 8): (75e6, 0.8333333333333334, 131_072, "Command R+"),
    (8192, 64): (8e6, 0.0625, 131_072, "Command R; Aya 23 35B has the same shapes"),
    (8192, 8): (4e6, 0.0625, 131_072, "Command R of August 2024 and Aya Expanse 32B"),
    (4096, 8): (1e4, 0.0625, 8192, "Aya 23 8B; Aya Expanse 8B has the same shapes and logit_scale 0.125"),
}


def _fill_cohere(t: Tensors) -> None:
    """Command R, R+ and Aya by their sizes."""
    name = "self_attn.q_norm.weight"
    t.put("use_qk_norm", t.has(name), f"whether the tensor {name} is there")
    found = COHERE.get((t.get("hidden_size") or 0, t.get("num_key_value_heads") or 0))
    if found is None:
        return
    theta, scale, longest, whose = found
    if not has_rope(t):
        t.default("rope_theta", theta, f"{whose}; --set rope_theta=…")
    t.default("logit_scale", scale, f"{whose}; --set logit_scale=…")
    t.default("max_position_embeddings", longest, whose)


def _fill_cohere2(t: Tensors) -> None:
    t.default("rope_theta", 5e4, "usual for Command A and R7B")
    t.default("logit_scale", 0.25, "usual for Command A and R7B")


@family(
    "CohereForCausalLM",
    model_types=("cohere",),
    defaults={**SHARED, "rope_theta": 5e5, "use_qk_norm": False},
    honours=("logit_scale", "use_qk_norm"),
    detection=Detection(
        markers=(
            Marker(
                (Q, "input_layernorm.weight", "mlp.gate_proj.weight", "self_attn.q_norm.weight"),
                (SECOND_NORM, "input_layernorm.bias"),
                order=390,
            ),
            Marker(
                (Q, "input_layernorm.weight", "mlp.gate_proj.weight"),
                (SECOND_NORM, "input_layernorm.bias"),
                note="Cohere2ForCausalLM",
                order=400,
            ),
        ),
        twins=("Cohere2ForCausalLM",),
        usual={"rope_theta": 8e6, "max_position_embeddings": 8192},
        fill=_fill_cohere,
    ),
    hf=HfConfig(words={"norm_eps": "layer_norm_eps"}),
)
def cohere(c: Config) -> tuple[ModelSpec, NameMap]:
    """Command R and R+: the larger one norms every head of q and k with a weight of its own."""
    qk_norm = norm(c, "layer") if c["use_qk_norm"] else None
    positions = rope(c, c["head_dim"], interleaved=True)
    mixer = gqa(c, rope=positions, qk_norm=qk_norm, qk_norm_over="each" if qk_norm else "head")
    return _cohere(c, "cohere", [mixer] * len(c["layer_types"]))


@family(
    "Cohere2ForCausalLM",
    model_types=("cohere2",),
    defaults={**SHARED, "sliding_window": 4096, "sliding_window_pattern": 4},
    honours=("logit_scale", "sliding_window", "position_embedding_type"),
    detection=Detection(
        markers=(
            Marker(
                (Q, "input_layernorm.weight", "mlp.gate_proj.weight"),
                (SECOND_NORM, "input_layernorm.bias", "self_attn.q_norm.weight"),
                _is_command_a,
                order=380,
            ),
        ),
        usual={"rope_theta": 8e6, "max_position_embeddings": 8192},
        fill=_fill_cohere2,
    ),
    hf=HfConfig(words={"norm_eps": "layer_norm_eps"}),
)
def cohere2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Command R7B, A, Aya Expanse's heirs: three layers with windows and positions, one with neither."""
    if (kind := c.get("position_embedding_type")) not in (None, "rope", "rope_gptj"):
        raise UnsupportedModel(
            f"position_embedding_type {kind!r} is not known for Cohere 2; known: rope_gptj"
        )
    mixers = _window_mixers(c)
    return _cohere(c, "cohere2", [mixers[kind] for kind in c["layer_types"]])


@family(
    "CohereCompassForCausalLM",
    model_types=("cohere_compass_text",),
    defaults={**SHARED, "logit_scale": 1.0, "sliding_window": 4096, "layer_cycle": [FULL]},
    honours=("logit_scale", "sliding_window"),
)
def cohere_compass(c: Config) -> tuple[ModelSpec, NameMap]:
    """North Micro's text model: a kind of layers for which the config has no positions turns nothing."""
    c["logit_scale"] = c["logit_scale"] or 1.0
    turned = {kind: rope(c, c["head_dim"], kind) for kind in c["rope_parameters"]}
    c["rope_parameters"].setdefault(FULL, {"rope_theta": 1e4, "partial_rotary_factor": 1.0})  # of none
    mixers = [gqa(c, kind, rope=turned.get(kind)) for kind in c["layer_types"]]
    return _cohere(c, "cohere_compass_text", mixers)


def _window_mixers(c: Config) -> dict[str, AttentionSpec]:
    turned = gqa(c, SLIDING, rope=rope(c, c["head_dim"], SLIDING, interleaved=True))
    return {SLIDING: turned, FULL: gqa(c, FULL, rope=None)}


@family(
    "Cohere2MoeForCausalLM",
    model_types=("cohere2_moe",),
    defaults={
        **SHARED,
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "prefix_dense_sliding_window_pattern": 1,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
    },
    honours=("logit_scale", "sliding_window"),
)
def cohere2_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Command A with experts; dense layers before them may have positions in spite of no window."""
    mixers, size = _window_mixers(c), c["intermediate_size"]
    require(c, "Command A", shared_expert_combination_strategy=("sum", "average"))
    require(c, "Command A", expert_selection_fn=("softmax", "sigmoid"))
    share = 0.5 if c["num_shared_experts"] and c["shared_expert_combination_strategy"] == "average" else 1.0
    softmax = c["expert_selection_fn"] == "softmax"  # of the chosen ones, as after dividing by their sum
    router = RouterSpec(c["expert_selection_fn"], softmax or c.get("norm_topk_prob", True), scale=share)
    shared = mlp(c, size * c["num_shared_experts"]) if c["num_shared_experts"] else None
    ffn: dict[str, Mixer] = {
        "sparse": MoeSpec(c["num_experts"], c["num_experts_per_tok"], mlp(c, size), router, shared=shared)
    }
    if "dense" in c["mlp_layer_types"]:
        ffn["dense"] = mlp(c, c["prefix_dense_intermediate_size"])
    prefix = dict(mixers)
    if c["prefix_dense_sliding_window_pattern"] == 1:
        prefix[FULL] = gqa(c, FULL, rope=rope(c, c["head_dim"], FULL, interleaved=True))
    kinds = list(zip(c["layer_types"], c["mlp_layer_types"], strict=True))
    attns = [(prefix if feed == "dense" else mixers)[kind] for kind, feed in kinds]
    names: Rules = {
        f"{MIX}.ffn.router": f"{L}.mlp.gate",
        f"{MIX}.ffn.shared.down.weight": scale_tensor(share, f"{L}.mlp.shared_experts.down_proj.weight"),
        f"{MIX}.ffn.shared.{{x}}": f"{L}.mlp.shared_experts.{{x}}_proj",
        **expert_tensors(f"{MIX}.ffn", f"{L}.mlp", c["num_experts"]),
    }
    each = norm(c, "layer" if c.get("rms_norm_eps") is None else "rms")
    return _cohere(c, "cohere2_moe", attns, [ffn[feed] for _, feed in kinds], names, each)


def _cohere(
    c: Config,
    name: str,
    mixers: list[AttentionSpec],
    ffns: list[Mixer] | None = None,
    own: Rules = NO_RULES,
    each: NormSpec | None = None,
) -> tuple[ModelSpec, NameMap]:
    each, feeds = each or norm(c, "layer"), ffns or [mlp(c)] * len(mixers)
    layers = [
        (BranchSpec("mix", ParallelSpec({"attn": mixer, "ffn": ffn}), each),)
        for mixer, ffn in zip(mixers, feeds, strict=True)
    ]
    names: Rules = {
        **own,
        **ends(),
        f"{MIX}.norm": f"{L}.input_layernorm",
        f"{MIX}.attn.{{x}}_norm.weight": flat(f"{L}.self_attn.{{x}}_norm.weight"),
        f"{MIX}.attn.{{x}}": f"{L}.self_attn.{{x}}_proj",
        f"{MIX}.ffn.{{x}}": f"{L}.mlp.{{x}}_proj",
    }
    spec = model(c, name, layers, norm=each, logit_scale=float(c["logit_scale"]))
    # Command R's config has a short `max_position_embeddings`, and next to it the length it was trained for.
    spec = replace(spec, max_len=max(spec.max_len, c.get("model_max_length") or 0))
    return spec, NameMap(names, ignored=unused_patterns(c))


def _gguf_names(c: Config) -> Rules:
    return {f"{MIX}.attn.{x}_norm.weight": flat(f"blk.{{i}}.attn_{x}_norm.weight") for x in ("q", "k")}


@gguf_arch("command-r", "CohereForCausalLM", names=_gguf_names)
def _command_r(m: Metadata) -> None:
    _logit_scale(m)
    m.put("use_qk_norm", "blk.0.attn_q_norm.weight" in m.shapes, "tensor blk.0.attn_q_norm.weight")


@gguf_arch("cohere2", "Cohere2ForCausalLM", constants={"sliding_window": 4096})
def _cohere2(m: Metadata) -> None:
    _logit_scale(m)
    windows(m, 4)


def _logit_scale(m: Metadata) -> None:
    """The scale of logits: here the key multiplies them, for other families it divides them."""
    m.config.pop("logits_scaling", None)
    m.take("logit_scale", "logit_scale", 0.0625)


def _moe_names(c: Config) -> Rules:
    """Shared experts count half, as the average of both has it."""
    share = 0.5 if c.get("num_shared_experts") else 1.0
    return {f"{MIX}.ffn.shared.down.weight": scale_tensor(share, "blk.{i}.ffn_down_shexp.weight")}


@gguf_arch("cohere2moe", "Cohere2MoeForCausalLM", names=_moe_names)
def _cohere2_moe(m: Metadata) -> None:
    _logit_scale(m)
    windows(m, 4)
    scores = {1: "softmax", 2: "sigmoid"}.get(kind := m.values.get("expert_gating_func", 2))
    if scores is None:
        raise UnsupportedModel(
            f"{m.prefix}expert_gating_func is {kind!r:.40}; Command A's is 1 (softmax) or 2 (sigmoid)"
        )
    m.put("expert_selection_fn", scores, f"{FILE} {m.prefix}expert_gating_func")
    m.put("prefix_dense_intermediate_size", m.config["intermediate_size"], f"{FILE} feed_forward_length")
    if eps := m.values.get("attention.layer_norm_rms_epsilon"):
        for key in ("rms_norm_eps", "norm_eps"):
            m.put(key, eps, f"{FILE} {m.prefix}attention.layer_norm_rms_epsilon")
    m.put("intermediate_size", m.values["expert_feed_forward_length"], f"{FILE} expert_feed_forward_length")
