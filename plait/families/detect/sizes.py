"""Sizes of attention, feed-forwards and experts, solved from the shapes of their tensors."""

from __future__ import annotations

from math import gcd

from plait.errors import UnsupportedModel
from plait.families.common.tensors import Named, Tensors

HEAD_DIMS = (128, 64, 256, 96, 80, 112, 160, 192, 32, 16, 8)
LATENT = "self_attn.kv_a_proj_with_mqa.weight"
Q = ("self_attn.q_proj.weight", "mixer.q_proj.weight", "temporal_block.q_proj.weight")
K = ("self_attn.k_proj.weight", "mixer.k_proj.weight", "temporal_block.k_proj.weight")
FUSED = ("self_attn.qkv_proj.weight", "mixer.qkv_proj.weight")
O = ("self_attn.o_proj.weight", "mixer.o_proj.weight")  # noqa: E741
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.q_layernorm.weight", "mixer.q_weight")
WIDTHS = (
    *("mlp.gate_proj.weight", "feed_forward.gate_proj.weight", "mixer.up_proj.weight"),
    *("mlp.c_fc.weight", "feed_forward.w1.weight", "block_sparse_moe.gate_proj.weight"),
)
FUSED_WIDTHS = ("mlp.gate_up_proj.weight", "shared_transformer.feed_forward.gate_up_proj.weight")
ONE_EXPERT = (
    *("mlp.experts.0.up_proj.weight", "block_sparse_moe.experts.0.w3.weight", "mlp.experts.0.w3.weight"),
    *("mixer.experts.0.up_proj.weight", "feed_forward.experts.0.up_proj.weight"),
    "feed_forward.experts.0.w3.weight",
)
ALL_EXPERTS = (
    *("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight", "mixer.experts.down_proj"),
    *("block_sparse_moe.experts.down_proj", "feed_forward.experts.down_proj"),
)
GATED_Q = ("Qwen3Next", "Qwen3_5")  # half of the rows of q are a gate's
SPARSE = (
    *("mlp.gate.weight", "block_sparse_moe.gate.weight", "block_sparse_moe.router.layer.weight"),
    *("block_sparse_moe.router.weight", "feed_forward.router.weight", "feed_forward.gate.weight"),
    *("mlp.router.weight", "mixer.gate.weight"),
)


def attention_sizes(t: Tensors, architecture: str) -> None:
    """Heads, key and value heads and their size; exact where norms or sinks show one of them."""
    rows = _q_and_k(t, architecture)
    if rows is None:
        return
    q, q_rows, k, k_rows = rows
    if q_rows < 1 or k_rows < 1:
        raise UnsupportedModel(f"{q[0]} {list(q[1])} and {k[0]} {list(k[1])} cannot be those of attention")
    if heads := t.get("num_attention_heads"):
        t.put("head_dim", q_rows // heads, f"tensor {q[0]} {list(q[1])} / {heads} heads")
    elif not _exact_head_dim(t, q_rows):
        t.put("head_dim", *_guess_head_dim(t, gcd(q_rows, k_rows), architecture))
    dim = t.get("head_dim")
    if not dim or q_rows % dim or k_rows % dim:
        raise UnsupportedModel(
            f"heads of {dim} do not divide {q[0]} {list(q[1])} and {k[0]} {list(k[1])}; --set head_dim=…"
        )
    t.put("num_attention_heads", q_rows // dim, f"tensor {q[0]} {list(q[1])} / head_dim {dim}")
    t.put("num_key_value_heads", k_rows // dim, f"tensor {k[0]} {list(k[1])} / head_dim {dim}")


def _q_and_k(t: Tensors, architecture: str) -> tuple[Named, int, Named, int] | None:
    """The tensors of q and k, and how many of their rows are theirs."""
    attends = O[0] if t.has(FUSED[0]) else None  # lightning layers have a qkv_proj, too
    if (q := t.first(*Q)) is not None:
        k = t.need(*K)
        return q, q[1][0] // (2 if architecture.startswith(GATED_Q) else 1), k, k[1][0]
    if (both := t.first(*FUSED, beside=attends)) is not None:
        o = t.need(*O)
        return both, o[1][-1], both, (both[1][0] - o[1][-1]) // 2
    return None


def _exact_head_dim(t: Tensors, q_rows: int) -> bool:
    """From tensors that have as many numbers as a head, or as there are heads."""
    if (inv_freq := t.first("self_attn.rotary_emb.inv_freq")) is not None:
        t.size("head_dim", 2 * inv_freq[1][0], inv_freq)
    elif (norm := t.first(*HEAD_NORMS)) is not None and norm[1] != (q_rows,):
        t.size("head_dim", norm[1][-1], norm)  # one weight for all heads, or one row for each
    else:
        counted = ("self_attn.sinks", "self_attn.slope_rate", "temporal_block.rg_lru.input_gate_weight")
        if (found := t.first(*counted)) is None or not found[1] or q_rows % max(found[1][0], 1):
            return False
        t.size("head_dim", q_rows // max(found[1][0], 1), found)
    return True


def _guess_head_dim(t: Tensors, common: int, architecture: str) -> tuple[int, str]:
    """Only heads x head_dim can be seen; the sizes in use, likeliest first, that divide both q and k."""
    hidden, order = t.get("hidden_size") or 0, list(HEAD_DIMS)
    small = hidden <= 1024 or (architecture == "LlamaForCausalLM" and hidden == 2048)
    if small or t.get("vocab_size") == 49152:
        order.insert(0, 64)
    order = {"Gemma2ForCausalLM": [256], "Phi3ForCausalLM": [96] * (hidden == 3072)}.get(
        architecture, []
    ) + order
    found = next((d for d in order if common and common % d == 0), None)
    if found is None:
        raise UnsupportedModel(
            f"no usual head size divides the {common} rows that q and k have in common; --set head_dim=…"
        )
    return (
        found,
        f"default (a usual size that divides the {common} rows q and k have in common; --set head_dim=…)",
    )


def latent_sizes(t: Tensors) -> None:
    """Five shapes, five unknowns: H = (A - B + C) / r; A, B: the rows of q and kv_b; C: the columns of o."""
    q = t.need("self_attn.q_b_proj.weight", "self_attn.q_proj.weight", beside=LATENT)
    kv_a, latent = t.need(LATENT), t.need("self_attn.kv_a_layernorm.weight")
    kv_b = t.need("self_attn.kv_b_proj.weight")
    o = t.need("self_attn.o_proj.weight", beside=LATENT)
    rank, rope_dim = latent[1][0], kv_a[1][0] - latent[1][0]
    heads, rest = divmod(q[1][0] - kv_b[1][0] + o[1][1], rope_dim) if rope_dim > 0 else (0, 1)
    if rest or heads < 1 or o[1][1] % heads or kv_b[1][0] % heads or kv_b[1][0] <= o[1][1]:
        raise UnsupportedModel(
            f"{q[0]}, {kv_a[0]}, {kv_b[0]} and {o[0]} do not fit together as latent attention"
        )
    t.size("kv_lora_rank", rank, latent)
    t.size("qk_rope_head_dim", rope_dim, kv_a)
    t.size("num_attention_heads", heads, q)
    t.size("v_head_dim", o[1][1] // heads, o)
    t.size("qk_nope_head_dim", (kv_b[1][0] - o[1][1]) // heads, kv_b)
    if q_norm := t.first("self_attn.q_a_layernorm.weight"):
        t.size("q_lora_rank", q_norm[1][0], q_norm)


def feed_forward_sizes(t: Tensors) -> None:
    """Widths of what every token passes."""
    if found := t.first(*WIDTHS):
        t.size("intermediate_size", found[1][0], found)
    elif found := t.first(*FUSED_WIDTHS):
        t.size("intermediate_size", found[1][0] // 2, found)
    elif found := t.first("mlp_block.gate_proj.weight"):
        t.size("intermediate_size", 2 * found[1][0], found)  # RecurrentGemma counts gate and up together
    if found := t.first("shared_mlp.output_linear.weight"):
        t.size("shared_intermediate_size", found[1][1], found)
    if t.has("ffn_norm.weight"):
        t.put("block_auto_adjust_ff_dim", False, "the width is the tensor's own")


def expert_sizes(t: Tensors) -> int | None:
    """How many experts there are, and how wide; None if there are none."""
    if (gate := t.first(*SPARSE)) is None:
        if t.has("mamba.dt_layernorm.weight"):
            t.put("num_experts", 1, "no layer has a router")
        return None
    t.size("num_experts", gate[1][0], gate)
    _expert_width(t)
    if (width := t.get("moe_intermediate_size")) is not None:
        t.put("intermediate_size", width, "no layer is dense: that of an expert")
    shared = ("mlp.shared_expert.up_proj.weight", "mixer.shared_experts.up_proj.weight")
    if found := t.first(*shared):
        t.size("shared_intermediate_size", found[1][0], found)
    several = ("mlp.shared_experts.up_proj.weight", "block_sparse_moe.shared_experts.up_proj.weight")
    if (found := t.first(*several)) and t.get("moe_intermediate_size"):
        t.size("n_shared_experts", found[1][0] // t.get("moe_intermediate_size"), found)
    if not t.is_said("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq", "expert_layer_period"):
        marks = dict.fromkeys(SPARSE[:-1], "sparse")
        t.put("mlp_layer_types", t.words(marks, "dense"), "the tensors of each layer")
    return gate[1][0]


def _expert_width(t: Tensors) -> None:
    if found := t.first(*ONE_EXPERT):
        t.size("moe_intermediate_size", found[1][0], found)
    elif found := t.first(*ALL_EXPERTS):
        shape, hidden = found[1], t.get("hidden_size")
        turned = len(shape) == 3 and shape[-1] == hidden != shape[1]  # [experts, width, hidden]
        t.size("moe_intermediate_size", shape[1] if turned else shape[-1], found)
