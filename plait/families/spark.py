"""Spark X2.5: a gate for each head, and windows with a rope of their own."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import split_qkv, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.spec.model import BranchSpec, ModelSpec

ATTN = "layers.{i}.attn"


@family(
    "Spark2_5ForCausalLM",
    model_types=("spark2_5",),
    defaults={"norm_eps": 1e-6, "hidden_act": "gelu"},
    honours=("sliding_window", "partial_rotary_factor"),
)
def spark(c: Config) -> tuple[ModelSpec, NameMap]:
    """Spark X2.5 1.7B: Llama with GeLU, gates by a sigmoid; q, k and v are one tensor."""
    require(c, "Spark X2.5", gate_attn_act_mode=("sigmoid",), headwise_attn_output_gate=(True,))
    each, ffn = norm(c), mlp(c)
    layers = [
        (BranchSpec("attn", gqa(c, kind, head_gate="sigmoid"), each), BranchSpec("ffn", ffn, each))
        for kind in c["layer_types"]
    ]
    attn = "model.layers.{i}.self_attn"
    names: Rules = {
        f"{ATTN}.head_gate": f"{attn}.g_proj",
        **split_qkv(c, ATTN, f"{attn}.q_k_v_proj"),
        **transformer(),
    }
    return model(c, "spark2_5", layers), NameMap(names, ignored=unused_patterns(c))


@gguf_arch(
    "spark2_5",
    "Spark2_5ForCausalLM",
    names=lambda c: {f"{ATTN}.head_gate": "blk.{i}.attn_gate"},
    is_written=False,
)
def _spark_in_gguf(m: Metadata) -> None:
    """Both kinds of layers say how much of a head turns; without a base of their own they share one."""
    windows(m, 1)
    dim, base = m.config["head_dim"], m.config["rope_theta"]
    near = m.values.get("rope.dimension_count_swa", m.values["rope.dimension_count"])
    turns = {
        FULL: {"rope_theta": base, "partial_rotary_factor": m.values["rope.dimension_count"] / dim},
        SLIDING: {
            "rope_theta": m.values.get("rope.freq_base_swa", base),
            "partial_rotary_factor": near / dim,
        },
    }
    m.put("rope_parameters", turns, f"{FILE} {m.prefix}rope")
