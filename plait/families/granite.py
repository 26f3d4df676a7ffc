"""Granite 3: Llama with four multipliers, dense or with experts. What Granite 4 shares is here, too."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import LOCAL, HfConfig
from plait.families.common.recipes import either, expert, expert_half, half, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope
from plait.families.common.tensors import Tensors
from plait.families.config.gguf_keys import KEYS
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.spec.model import AttentionSpec, BranchSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec

L, FFN = "model.layers.{i}", "layers.{i}.ffn"
MULTIPLIERS = ("residual_multiplier", "attention_multiplier", "embedding_multiplier", "logits_scaling")
WINDOWS = {"norm_eps": 1e-5, "sliding_window": 128, "window_layers": "between"}
SHARED = {"norm_eps": 1e-6, "hidden_act": "silu", **dict.fromkeys(MULTIPLIERS, 1.0)}


def _fill_granite(t: Tensors) -> None:
    t.default("attention_multiplier", 1.0, "the tensors do not hold Granite's multipliers; --set each")


@family(
    "GraniteDoclingForConditionalGeneration",
    model_types=("granite_docling_text", "granite_docling"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
        "tie_word_embeddings": True,
    },
    honours=MULTIPLIERS,
)
@family(
    *("GraniteForCausalLM", "Granite4VisionForConditionalGeneration"),
    model_types=("granite", "granite4_vision_text", "granite4_vision"),
    defaults=SHARED,
    honours=MULTIPLIERS,
    detection=Detection(fill=_fill_granite),
)
def granite(c: Config) -> tuple[ModelSpec, NameMap]:
    """Granite 3 dense, and the text of Granite Docling and Granite 4 Vision."""
    return _granite(c, "granite", mlp(c), {})


@family(
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_types=("granitemoe", "granitemoeshared"),
    defaults={**SHARED, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    honours=MULTIPLIERS,
    detection=Detection(
        markers=(
            Marker(
                ("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight"),
                order=260,
                architecture="GraniteMoeSharedForCausalLM",
            ),
            Marker(("block_sparse_moe.input_linear.weight",), order=270),
        ),
        top_k=8,
        usual={"rope_theta": 1e4, "max_position_embeddings": 4096},
        fill=_fill_granite,
    ),
    hf=HfConfig(words=LOCAL),
)
def granite_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Granite 3 with experts, and perhaps a shared one."""
    return _granite(c, "granitemoe", granite_ffn(c), granite_tensors(c))


@family(
    "GraniteSWAForCausalLM",
    model_types=("granite_swa",),
    defaults={**SHARED, **WINDOWS, "tie_word_embeddings": True},
    honours=(*MULTIPLIERS, "sliding_window", "layer_rope_theta"),
)
def granite_swa(c: Config) -> tuple[ModelSpec, NameMap]:
    """Granite with windows: a sink per head, a base of positions for each layer, 0 for none."""
    return _granite(c, "granite_swa", mlp(c), {}, _window_mixers(c))


@family(
    "GraniteMoeSWAForCausalLM",
    model_types=("granitemoe_swa",),
    defaults={**SHARED, **WINDOWS, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    honours=(*MULTIPLIERS, "sliding_window", "layer_rope_theta"),
)
def granite_moe_swa(c: Config) -> tuple[ModelSpec, NameMap]:
    """The same with experts."""
    return _granite(c, "granitemoe_swa", granite_ffn(c), granite_tensors(c), _window_mixers(c))


def _window_mixers(c: Config) -> list[AttentionSpec]:
    thetas = c.get("layer_rope_theta") or [None] * len(c["layer_types"])
    if len(thetas) != len(c["layer_types"]):
        raise UnsupportedModel(
            f"layer_rope_theta has {len(thetas)} entries for {len(c['layer_types'])} layers; they must agree"
        )
    usual = rope(c, c["head_dim"])
    turns = [usual if theta is None else replace(usual, theta=float(theta)) for theta in thetas]
    return [
        gqa(c, kind, scale=float(c["attention_multiplier"]), sinks=True, rope=turn if turn.theta else None)
        for kind, turn in zip(c["layer_types"], turns, strict=True)
    ]


@family(
    "HyperCLOVAXForCausalLM",
    model_types=("hyperclovax",),
    defaults={**SHARED, "attention_multiplier": None, "use_post_norm": True},
    honours=(*MULTIPLIERS, "use_post_norm"),
)
def hyperclovax(c: Config) -> tuple[ModelSpec, NameMap]:
    """HyperCLOVA X SEED Think: norms behind the mixers; its `logits_scaling` multiplies logits."""
    if c["attention_multiplier"] is None:
        c["attention_multiplier"] = c["head_dim"] ** -0.5
    c["logits_scaling"] = 1 / c["logits_scaling"]
    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_norm1",
        "layers.{i}.ffn.post_norm": f"{L}.post_norm2",
    }
    return _granite(c, "hyperclovax", mlp(c), names, post_norm=norm(c) if c["use_post_norm"] else None)


def _granite(
    c: Config,
    name: str,
    ffn: MlpSpec | MoeSpec,
    names: Rules,
    mixers: list[AttentionSpec] | None = None,
    post_norm: NormSpec | None = None,
) -> tuple[ModelSpec, NameMap]:
    each, scale = norm(c), c["residual_multiplier"]
    usual = [gqa(c, scale=float(c["attention_multiplier"]))] * len(c["layer_types"])
    feed = BranchSpec("ffn", ffn, each, post_norm, scale)
    layers = [(BranchSpec("attn", mixer, each, post_norm, scale), feed) for mixer in mixers or usual]
    spec = model(
        c, name, layers, embed_scale=float(c["embedding_multiplier"]), logit_scale=1 / c["logits_scaling"]
    )
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


def granite_ffn(c: Config) -> MlpSpec | MoeSpec:
    """Experts next to a shared feed-forward, or one of the two alone."""
    if not c.get("num_experts"):
        return mlp(c, c["shared_intermediate_size"])
    shared, each = c.get("shared_intermediate_size"), mlp(c, c["moe_intermediate_size"])
    both = mlp(c, shared) if shared else None
    return MoeSpec(c["num_experts"], c["num_experts_per_tok"], each, RouterSpec(), shared=both)


def granite_tensors(c: Config) -> Rules:
    """The feed-forward of Granite: stacks of experts under their old or new names, gate and up fused."""
    count, theirs, one = c.get("num_experts") or 0, f"{L}.block_sparse_moe", f"{L}.shared_mlp"
    shared = f"{FFN}.shared" if count else FFN
    alone: Rules = {
        f"{shared}.gate.weight": half(0, f"{one}.input_linear.weight"),
        f"{shared}.up.weight": half(1, f"{one}.input_linear.weight"),
        f"{shared}.down": f"{one}.output_linear",
    }
    if not count:
        return alone
    ways = (
        (f"{theirs}.router.layer", f"{theirs}.input_linear.weight", f"{theirs}.output_linear.weight"),
        (f"{theirs}.router", f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj"),
    )
    return {**either(*(_expert_rules(count, *way) for way in ways)), **alone}


def _expert_rules(count: int, router: str, up: str, down: str) -> Rules:
    return {
        f"{FFN}.router": router,
        f"{FFN}.experts.{{e}}.gate.weight": expert_half(0, count, up),
        f"{FFN}.experts.{{e}}.up.weight": expert_half(1, count, up),
        f"{FFN}.experts.{{e}}.down.weight": expert(count, down),
    }


def attention_scale(m: Metadata) -> None:
    """The scale of attention: 1/sqrt(head_dim) where the file has no key, or 0."""
    if not m.config.get("attention_multiplier") and m.config.get("num_attention_heads"):
        dim = m.config.get("head_dim") or m.config["hidden_size"] // m.config["num_attention_heads"]
        m.put("attention_multiplier", dim**-0.5, "default (1 / √head_dim)")


def _granite_in_gguf(m: Metadata) -> None:
    attention_scale(m)
    if m.values.get("rope.scaling.finetuned") is False:  # means so for these architectures alone
        m.put("position_embedding_type", "nope", f"{FILE} {m.prefix}rope.scaling.finetuned")


gguf_arch("granite", "GraniteForCausalLM", constants={"rope_interleave": True})(_granite_in_gguf)
gguf_arch("granitemoe", "GraniteMoeForCausalLM", constants={"rope_interleave": True})(_granite_in_gguf)


@gguf_arch("minicpm", "GraniteForCausalLM", constants={"rope_interleave": True}, is_written=False)
def _minicpm(m: Metadata) -> None:
    """MiniCPM 1, 2 and 4: Granite's multipliers. Files of before they were written have the first model's."""
    attention_scale(m)
    usual = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / m.config["num_hidden_layers"] ** 0.5,
        "logits_scaling": m.config["hidden_size"] / 256,
    }
    written = {ours for theirs, ours in KEYS.items() if theirs in m.values}  # a factor of 0 is none
    for key, value in usual.items():
        if key not in written:
            m.put(key, value, "default (the minicpm format)")


def _window_names(c: Config) -> Rules:
    """A shared expert's gate and up are one tensor; a feed-forward's without experts are two."""
    both = "blk.{i}.ffn_up_shexp.weight"
    shared = {f"{FFN}.shared.{x}.weight": half(i, both) for i, x in enumerate(("gate", "up"))}
    return {"layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight", **(shared if c.get("num_experts") else {})}


@gguf_arch("granite_swa", "GraniteSWAForCausalLM", constants={"rope_interleave": True}, names=_window_names)
def _windows_in_gguf(m: Metadata) -> None:
    attention_scale(m)
    windows(m, 4)
    turned = m.values.get("attention.rope_pattern")
    bases = [m.config["rope_theta"] if one else 0 for one in turned or ()]
    m.put("layer_rope_theta", bases, f"{FILE} {m.prefix}attention.rope_pattern")
    if m.config.get("num_experts"):
        m.put("architectures", ["GraniteMoeSWAForCausalLM"], f"{FILE} {m.prefix}expert_count")
        m.size("shared_intermediate_size", "ffn_down_shexp.weight", 1)
