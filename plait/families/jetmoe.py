"""JetMoe: experts in attention as in the feed-forward; keys and values are the same for all of them."""

from __future__ import annotations

from dataclasses import fields

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import ends, expert, expert_half, part, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, softmax_moe
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, Config
from plait.quant.weight import as_tensor
from plait.spec.attention import ExpertHeadsSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, NormSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
QUERIES = "self_attention.experts.input_linear.weight"
EACH = NormSpec(1e-6)  # of layers, whatever rms_norm_eps says of the last norm


def _infer_sizes(t: Tensors) -> None:
    """The stacks of experts; heads of 128 are usual."""
    q, up = (t.need(x) for x in (QUERIES, "mlp.input_linear.weight"))
    t.size("num_local_experts", q[1][0], q)
    t.size("intermediate_size", up[1][1] // 2, up)
    dim = t.get("kv_channels") or t.get("head_dim") or 128
    t.default("head_dim", dim, "the tensors do not tell; heads of 128 are usual")
    t.size("num_key_value_heads", q[1][1] // dim, q)
    t.default("num_experts_per_tok", 2)
    t.put("num_attention_heads", q[1][1] // dim * t.get("num_experts_per_tok"), "key heads of each expert")


@family(
    "JetMoeForCausalLM",
    model_types=("jetmoe",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 16, "num_experts": 8}
    | {"num_experts_per_tok": 2, "tie_word_embeddings": True},
    detection=Detection(markers=(Marker((QUERIES,), order=12),), kinds={QUERIES: FULL}, sizes=_infer_sizes),
)
def jetmoe(c: Config) -> tuple[ModelSpec, NameMap]:
    """JetMoe 8B."""
    groups, top_k, count = c["num_key_value_heads"], c["num_experts_per_tok"], c["num_experts"]
    if not 0 < top_k <= count:
        raise UnsupportedModel(f"num_experts_per_tok is {top_k}, of {count} experts")
    c["num_attention_heads"], c["head_dim"] = groups * top_k, c.get("kv_channels") or c.get("head_dim") or 128
    usual, moe = gqa(c), softmax_moe(c, num_experts=count)
    told = {field.name: getattr(usual, field.name) for field in fields(AttentionSpec)}
    attn = ExpertHeadsSpec(**told, num_experts=count, top_k=top_k, router=moe.router)
    layer = (BranchSpec("attn", attn, EACH), BranchSpec("ffn", moe, EACH))
    layers = [layer] * c["num_hidden_layers"]
    return model(c, "jetmoe", layers, norm=norm(c)), NameMap(_names(c), ends(), ignored=unused_patterns(c))


def _names(c: Config) -> Rules:
    count, kv = c["num_experts"], c["num_key_value_heads"] * c["head_dim"]
    attn, moe = f"{L}.self_attention", f"{L}.mlp"
    return {
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        f"{ATTN}.router": f"{attn}.experts.router.layer",
        f"{FFN}.router": f"{moe}.router.layer",
        **{f"{ATTN}.{x}.weight": part(n, (kv, kv), f"{attn}.kv_proj.weight") for n, x in enumerate("kv")},
        f"{ATTN}.experts.{{e}}.q.weight": expert(count, f"{attn}.experts.input_linear.weight"),
        f"{ATTN}.experts.{{e}}.o.weight": expert(count, f"{attn}.experts.output_linear.weight"),
        f"{FFN}.experts.{{e}}.gate.weight": expert_half(0, count, f"{moe}.input_linear.weight"),
        f"{FFN}.experts.{{e}}.up.weight": expert_half(1, count, f"{moe}.input_linear.weight"),
        f"{FFN}.experts.{{e}}.down.weight": expert(count, f"{moe}.output_linear.weight"),
        **_same_for_all(f"{ATTN}.experts.{{e}}.o.bias", f"{attn}.experts.bias"),
        **_same_for_all(f"{FFN}.experts.{{e}}.down.bias", f"{moe}.bias"),
    }


def _same_for_all(ours: str, theirs: str) -> Rules:
    """What is added to a token's result, whichever experts it has: their weights sum to one."""
    again = Derived(lambda b, **_: as_tensor(b), (theirs,), (None,))
    return {ours.replace("{e}", "0"): theirs, ours: again}
