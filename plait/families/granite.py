"""Granite 3: Llama with four multipliers, dense or with experts. What Granite 4 shares is here, too."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import ArchitectureMarker, Detection
from plait.families.common.hf_config import LOCAL, HfConfig
from plait.families.common.recipes import either, expert, expert_half, half, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec import BranchSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec

L, FFN = "model.layers.{i}", "layers.{i}.ffn"
MULTIPLIERS = ("residual_multiplier", "attention_multiplier", "embedding_multiplier", "logits_scaling")
SHARED = {"norm_eps": 1e-6, "hidden_act": "silu", **dict.fromkeys(MULTIPLIERS, 1.0)}


def _fill_granite(t: Tensors) -> None:
    t.default("attention_multiplier", 1.0, "the tensors do not hold Granite's multipliers; --set each")


@family(
    "GraniteForCausalLM",
    model_types=("granite",),
    defaults=SHARED,
    honours=MULTIPLIERS,
    detection=Detection(fill=_fill_granite),
)
def granite(c: Config) -> tuple[ModelSpec, NameMap]:
    """Granite 3 dense."""
    return _granite(c, "granite", mlp(c), {})


@family(
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_types=("granitemoe", "granitemoeshared"),
    defaults={**SHARED, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    honours=MULTIPLIERS,
    detection=Detection(
        markers=(
            ArchitectureMarker(
                "GraniteMoeSharedForCausalLM",
                ("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight"),
                order=260,
            ),
            ArchitectureMarker("GraniteMoeForCausalLM", ("block_sparse_moe.input_linear.weight",), order=270),
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


def _granite(c: Config, name: str, ffn: MlpSpec | MoeSpec, names: Rules) -> tuple[ModelSpec, NameMap]:
    each, scale = norm(c), c["residual_multiplier"]
    attn = BranchSpec("attn", gqa(c, scale=float(c["attention_multiplier"])), each, scale=scale)
    layers = [(attn, BranchSpec("ffn", ffn, each, scale=scale))] * len(c["layer_types"])
    spec = model(
        c,
        name,
        layers,
        embed_scale=float(c["embedding_multiplier"]),
        logit_scale=1 / c["logits_scaling"],
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


def _attention_scale(m: Metadata) -> None:
    """The scale of attention: 1/sqrt(head_dim) where the file has no key."""
    if "attention_multiplier" not in m.config:
        dim = m.config.get("head_dim") or m.config["hidden_size"] // m.config["num_attention_heads"]
        m.put("attention_multiplier", dim**-0.5, "default (1 / √head_dim)")


gguf_arch("granite", "GraniteForCausalLM", constants={"rope_interleave": True})(_attention_scale)
gguf_arch("granitemoe", "GraniteMoeForCausalLM", constants={"rope_interleave": True})(_attention_scale)
