"""Gemma 4: wider heads in layers without windows, where keys may be values; shared keys, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import GEMMA_WORDS, HfConfig
from plait.families.common.recipes import (
    TEXT_PREFIXES,
    VISION,
    at,
    expert,
    expert_half,
    expert_tensors,
    scale_tensor,
    text_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import check_shares, gqa, mlp, model, norm, require, rope
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.spec.attention import SharedKeysSpec
from plait.spec.branches import LayerInputSpec
from plait.spec.model import (
    AttentionSpec,
    BranchSpec,
    LayerInputsSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ParallelSpec,
)

OTHERS = (  # what is for images and sounds
    r"^(model\.)?(embed_vision|embed_audio|audio_tower|vision_embedder|audio_embedder)\.",
)
OWN = {"head_dim", "num_key_value_heads"}  # what layers may have otherwise
HALF = 0.5**0.5  # the two parts of a layer's own input are added and divided by √2
DEFAULTS = {
    "norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "tie_word_embeddings": True,
}
HONOURS = (
    *("sliding_window", "per_layer_config", "final_logit_softcapping", "use_bidirectional_attention"),
    *("num_kv_shared_layers", "hidden_size_per_layer_input", "partial_rotary_factor"),
)


@family(
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_types=("gemma4_text", "gemma4"),
    defaults=DEFAULTS,
    honours=HONOURS,
    hf=HfConfig(words=GEMMA_WORDS),
)
def gemma4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 4 31B; E2B and E4B with shared keys and inputs of each layer; 26B-A4B with experts.

    What a layer reads of another is the keys and values of the last layer of its kind that has any.
    """
    return _gemma4(c, "gemma4_text")


@family(
    *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    model_types=("gemma4_unified_text", "gemma4_unified"),
    defaults={**DEFAULTS, "sliding_window": 1024},
    honours=HONOURS,
    hf=HfConfig(words=GEMMA_WORDS),
)
def gemma4_unified(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 4 12B: images and sounds without encoders; its text is Gemma 4."""
    return _gemma4(c, "gemma4_unified_text")


def _gemma4(c: Config, name: str) -> tuple[ModelSpec, NameMap]:
    usual = text_tensors(transformer)
    own_names = at(TEXT_PREFIXES, lambda prefix: layer_names(c, prefix))
    count = len(c["layer_types"])
    unused = [
        rf"\.layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."
        for i in range(count - (c.get("num_kv_shared_layers") or 0), count)
    ]
    names = NameMap(own_names, usual, ignored=unused_patterns(c, *VISION, *OTHERS, *unused))
    return gemma4_layers(c, name), names


def gemma4_layers(c: Config, name: str) -> ModelSpec:
    """All layers, without the names of their tensors. Raises UnsupportedModel."""
    require(c, "Gemma 4", use_bidirectional_attention=("vision",))
    check_shares(c, "Gemma 4")
    each, size = norm(c), c.get("hidden_size_per_layer_input")
    kinds = [*c["layer_types"][:-1], FULL]
    shared = len(kinds) - (c.get("num_kv_shared_layers") or 0)
    layers = []
    for i, kind in enumerate(kinds):
        source = find_source(kinds, i, shared) if i >= shared else None
        attn = BranchSpec("attn", attention_of(c, i, kind, source), each, each)
        wide = 2 if source and c.get("use_double_wide_mlp") else 1
        layer = [attn, feed_of(c, wide, is_last=not size)]
        if size:
            own = LayerInputSpec(i, size, c["hidden_act"])
            layer.append(BranchSpec("own", own, None, each, factor=True))
        layers.append(tuple(layer))
    return model(
        c,
        name,
        layers,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c.get("final_logit_softcapping"),
        layer_inputs=inputs_of_layers(c, len(kinds)) if size else None,
    )


def find_source(kinds: list[str], i: int, shared: int, part: str = "attn") -> str:
    """The mixer of which layer i reads the keys: the last of its kind that has some."""
    found = [j for j in range(shared) if kinds[j] == kinds[i]]
    if not found:
        raise UnsupportedModel(
            f"layer {i} shares its keys, but none of the first {shared} layers is of its kind, {kinds[i]}; "
            "num_kv_shared_layers must leave one"
        )
    return f"layers.{found[-1]}.{part}"


def attention_of(c: Config, i: int, kind: str, source: str | None) -> AttentionSpec:
    own, each = _own_sizes(c, i, kind), norm(c)
    dim, heads = own.get("head_dim", c["head_dim"]), own.get("num_key_value_heads", c["num_key_value_heads"])
    changes = {"head_dim": dim, "num_kv_heads": heads, "rope": rope(c, dim, kind)}
    usual = gqa(c, kind, scale=1.0, qk_norm=each, v_norm=NormSpec(c["norm_eps"], weight=False), **changes)
    if source is None:
        return usual
    own = {f.name: getattr(usual, f.name) for f in fields(usual)}
    return SharedKeysSpec(**{**own, "v_norm": None}, source=source)


def feed_of(c: Config, wide: int, *, is_last: bool) -> BranchSpec:
    """An MLP, or next to it experts; each part then has a norm before and one behind."""
    each, plain = norm(c), mlp(c, wide * c["intermediate_size"])
    if not c.get("enable_moe_block"):
        return BranchSpec("ffn", plain, each, each, factor=is_last)
    moe = MoeSpec(
        c["num_experts"],
        c["num_experts_per_tok"],
        mlp(c, c["moe_intermediate_size"]),
        router_norm=each,
        expert_norm=each,
        expert_scale=True,
    )
    both = ParallelSpec({"mlp": plain, "moe": moe}, {"mlp": each}, {"mlp": each, "moe": each})
    return BranchSpec("ffn", both, None, each, factor=is_last)


def inputs_of_layers(c: Config, count: int) -> LayerInputsSpec:
    """eps is that of numbers that are divided by √hidden before they are normed."""
    size, rows = c["hidden_size_per_layer_input"], c.get("vocab_size_per_layer_input") or c["vocab_size"]
    each = NormSpec(c["norm_eps"] * c["hidden_size"])
    return LayerInputsSpec(count, size, rows, (size / 2) ** 0.5, each)


def _own_sizes(c: Config, i: int, kind: str) -> Mapping[str, Any]:
    """What this layer has otherwise than the config's sizes."""
    if (given := c.get("per_layer_config")) is not None:
        own: Mapping[str, object] = given.get(str(i)) or given.get(i) or {}
        if unknown := set(own) - OWN:
            raise UnsupportedModel(f"per_layer_config has {sorted(unknown)}; known: {sorted(OWN)}")
        return own
    if kind != FULL:
        return {}
    heads = c.get("num_global_key_value_heads") if c["attention_k_eq_v"] else None
    return {"head_dim": c["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})


def layer_names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    return {
        "layers.{i}.attn.post_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attn.v": (f"{layer}.self_attn.v_proj", f"{layer}.self_attn.k_proj"),
        "layers.{i}.ffn.norm": f"{layer}.pre_feedforward_layernorm",
        "layers.{i}.ffn.post_norm": f"{layer}.post_feedforward_layernorm",
        "layers.{i}.{branch}.factor": f"{layer}.layer_scalar",
        **(_expert_names(c, layer) if c.get("enable_moe_block") else {}),
        "layers.{i}.own.gate": f"{layer}.per_layer_input_gate",
        "layers.{i}.own.out": f"{layer}.per_layer_projection",
        "layers.{i}.own.post_norm": f"{layer}.post_per_layer_input_norm",
        "layer_inputs": f"{prefix}embed_tokens_per_layer",
        "layer_inputs.project": f"{prefix}per_layer_model_projection",
        "layer_inputs.norm.weight": scale_tensor(HALF, f"{prefix}per_layer_projection_norm.weight"),
    }


def _expert_names(c: Config, layer: str) -> Rules:
    mlp, moe = "layers.{i}.ffn.mlp", "layers.{i}.ffn.moe"
    return {
        f"{mlp}.norm": f"{layer}.pre_feedforward_layernorm",
        f"{mlp}.post_norm": f"{layer}.post_feedforward_layernorm_1",
        f"{mlp}.{{x}}": f"{layer}.mlp.{{x}}_proj",
        f"{moe}.post_norm": f"{layer}.post_feedforward_layernorm_2",
        f"{moe}.router_norm.weight": scale_tensor(c["hidden_size"] ** -0.5, f"{layer}.router.scale"),
        f"{moe}.expert_norm": f"{layer}.pre_feedforward_layernorm_2",
        f"{moe}.expert_scale": f"{layer}.router.per_expert_scale",
        f"{moe}.router": f"{layer}.router.proj",
        **expert_tensors(moe, layer, c["num_experts"]),
    }


def names_in_gguf(c: Config) -> Rules:
    b, mlp, moe = "blk.{i}", "layers.{i}.ffn.mlp", "layers.{i}.ffn.moe"
    stack, count = f"{b}.ffn_gate_up_exps.weight", c.get("num_experts") or 0
    experts: dict[str, Source | tuple[Source, ...]] = {
        f"{mlp}.norm": f"{b}.ffn_norm",
        f"{mlp}.post_norm": f"{b}.post_ffw_norm_1",
        f"{mlp}.{{x}}": f"{b}.ffn_{{x}}",
        f"{moe}.post_norm": f"{b}.post_ffw_norm_2",
        f"{moe}.router_norm.weight": scale_tensor(c["hidden_size"] ** -0.5, f"{b}.ffn_gate_inp.scale"),
        f"{moe}.expert_norm": f"{b}.pre_ffw_norm_2",
        f"{moe}.expert_scale": f"{b}.ffn_down_exps.scale",
        f"{moe}.router": f"{b}.ffn_gate_inp",
        f"{moe}.experts.{{e}}.down.weight": expert(count, f"{b}.ffn_down_exps.weight"),
    }
    for n, x in enumerate(("gate", "up")):
        both, alone = expert_half(n, count, stack), expert(count, f"{b}.ffn_{x}_exps.weight")
        experts[f"{moe}.experts.{{e}}.{x}.weight"] = (both, alone)
    return {
        "layers.{i}.attn.v": (f"{b}.attn_v", f"{b}.attn_k"),
        "layers.{i}.{branch}.factor": f"{b}.layer_output_scale.weight",
        "layers.{i}.own.gate": f"{b}.inp_gate",
        "layers.{i}.own.out": f"{b}.proj",
        "layers.{i}.own.post_norm": f"{b}.post_norm",
        "layer_inputs": "per_layer_token_embd",
        "layer_inputs.project": "per_layer_model_proj",
        "layer_inputs.norm.weight": scale_tensor(HALF, "per_layer_proj_norm.weight"),
        **(experts if count else {}),
    }


@gguf_arch(
    "gemma4",
    "Gemma4ForCausalLM",
    names=names_in_gguf,
    by_layer={"attention.head_count_kv": "kv_heads", "feed_forward_length": "widths"},
)
def _in_gguf(m: Metadata) -> None:
    """Sizes of whole layers have the usual keys, those of layers with windows have keys of their own."""
    windows(m, 6)
    wide, near = m.config["head_dim"], m.values.get("attention.key_length_swa", m.config["head_dim"])
    count = m.config["num_hidden_layers"]
    heads = m.config.get("kv_heads") or [m.config["num_key_value_heads"]] * count
    kinds = m.config.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(count)]
    sizes = {
        i: {"head_dim": wide if kind == FULL else near, "num_key_value_heads": heads[i]}
        for i, kind in enumerate(kinds)
    }
    m.put("per_layer_config", sizes, f"{FILE} {m.prefix}attention")
    widths = m.config.get("widths") or [m.config["intermediate_size"]]
    m.put("intermediate_size", min(widths), f"{FILE} {m.prefix}feed_forward_length")
    m.put("use_double_wide_mlp", len({*widths}) > 1, f"{FILE} {m.prefix}feed_forward_length")
    m.put("enable_moe_block", bool(m.config.get("num_experts")), f"{FILE} {m.prefix}expert_count")
    m.take("num_kv_shared_layers", "attention.shared_kv_layers", 0)
    m.take("hidden_size_per_layer_input", "embedding_length_per_layer_input", 0)
    turned = m.values.get("rope.dimension_count_swa", near) / near
    base = m.values.get("rope.freq_base_swa", 1e4)
    local = {"rope_theta": base, "partial_rotary_factor": turned}
    m.put(
        "rope_parameters", {FULL: m.config.get("rope_scaling", {}), SLIDING: local}, f"{FILE} {m.prefix}rope"
    )
