"""What a model is, from the names and shapes of its tensors alone: for checkpoints without a (whole) config.

Layer kinds and nearly all sizes are exact. What shapes cannot tell (rope theta, top-k, windows, multipliers,
Mamba2's groups, plain GQA's head size) gets a default, and the provenance says so and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

from plait.errors import UnsupportedModel
from plait.families.normalize import ALIASES, FULL, LINEAR

Shapes = Mapping[str, tuple[int, ...]]
LAYER = re.compile(r"^(?P<prefix>.*?)layers\.(?P<i>\d+)\.(?P<rest>.+)$")
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embedding.weight")
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "output.weight")
HEAD_DIMS = (128, 64, 256, 96, 80, 112, 160, 192, 32, 16, 8)
MTP = ("eh_proj.weight", "shared_head.norm.weight")
OTHERS = ("vision_tower.", "visual.", "audio_tower.", "mtp.", "multi_modal_projector.")

# vocabulary size -> (rope theta, longest sequence) of the Llama class that was trained with it
LLAMA_VOCABULARIES: Mapping[int, tuple[float, int]] = {
    32000: (1e4, 4096),
    32016: (1e6, 16384),
    32768: (1e6, 32768),
    49152: (1e5, 8192),
    128256: (5e5, 131072),
    131072: (1e6, 131072),
}
TOP_K = {8: 2, 16: 2, 32: 4, 60: 4, 64: 6, 128: 8, 160: 6, 256: 8, 512: 10}
YARN_DEEPSEEK = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}


class Tensors:
    """A checkpoint's shapes by layer, and what has been concluded from them so far."""

    def __init__(self, shapes: Shapes, known: Mapping[str, Any]) -> None:
        self.known, self.values, self.why = known, dict[str, Any](), dict[str, str]()
        self.ends: dict[str, tuple[int, ...]] = {}
        self.layers: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, shape in shapes.items():
            if name.startswith(OTHERS) or name.startswith(tuple(f"model.{o}" for o in OTHERS)):
                continue
            if match := LAYER.match(name):
                self.layers.setdefault(int(match["i"]), {})[match["rest"]] = (name, tuple(shape))
            else:
                self.ends[name] = tuple(shape)
        for i in [i for i, layer in self.layers.items() if any(m in layer for m in MTP)]:
            del self.layers[i]  # guesses a second token; not part of the model
        if not self.layers:
            raise UnsupportedModel(
                f"no tensor of {', '.join(sorted(shapes)[:4])}… is called '…layers.N.…': no model Plait knows"
            )

    def has(self, rest: str) -> bool:
        return any(rest in layer for layer in self.layers.values())

    def first(self, *choices: str) -> tuple[str, tuple[int, ...]] | None:
        """(its name, its shape) in the first layer that has one of these."""
        for rest in choices:
            for i in sorted(self.layers):
                if rest in self.layers[i]:
                    return self.layers[i][rest]
        return None

    def need(self, *choices: str) -> tuple[str, tuple[int, ...]]:
        if (found := self.first(*choices)) is None:
            raise UnsupportedModel(
                f"cannot tell the model's sizes: no layer has a tensor {' or '.join(choices)!r}"
            )
        return found

    def put(self, key: str, value: Any, why: str) -> None:
        """Conclude, unless the config or an earlier conclusion has spoken."""
        names = (key, *ALIASES.get(key, ()))
        if key not in self.values and all(self.known.get(name) is None for name in names):
            self.values[key], self.why[key] = value, why

    def size(self, key: str, value: int, source: tuple[str, tuple[int, ...]]) -> None:
        self.put(key, value, f"tensor {source[0]} {list(source[1])}")

    def default(self, key: str, value: Any, why: str = "the tensors do not tell") -> None:
        self.put(key, value, f"default ({why})")

    def get(self, key: str) -> Any:
        for name in (key, *ALIASES.get(key, ())):
            if self.known.get(name) is not None:
                return self.known[name]
        return self.values.get(key)


def infer_config(
    shapes: Shapes, known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(config, provenance) of what `known` (a partial config) does not say. Raises UnsupportedModel.

    An architecture in `known` is a family's first.
    Provenance, per key: "tensor NAME shape" or "default (why)".
    """
    t = Tensors(shapes, known or {})
    named = t.known.get("architectures")
    architecture = named[0] if named else _architecture(t)
    if not named:
        t.put("architectures", [architecture], f"the tensors' names, e.g. {_example(t)}")
    embed = next(((n, s) for n, s in t.ends.items() if n.endswith(EMBEDDINGS)), None)
    if embed is not None:
        t.size("vocab_size", embed[1][0], embed)
        t.size("hidden_size", embed[1][1], embed)
    t.put("num_hidden_layers", len(t.layers), f"layers.0 … layers.{len(t.layers) - 1} of the file")
    if not any(head in t.ends for head in HEADS):
        t.put("tie_word_embeddings", True, f"tensor {HEADS[0]} is not there")
    if t.has("self_attn.kv_a_proj_with_mqa.weight"):
        _mla(t)
    elif t.has("self_attn.q_proj.weight") or t.has("mixer.q_proj.weight"):
        _attention(t, architecture)
    if t.has("mamba.A_log") or t.has("mixer.A_log"):
        _mamba(t, architecture)
    _feed_forward(t)
    _experts(t, architecture)
    _defaults(t, architecture)
    return t.values, t.why


RECURRENT = ("mamba.A_log", "mixer.A_log", "self_attn.A_log", "linear_attn.A_log")


def layer_kinds(shapes: Shapes) -> dict[int, tuple[str, str]]:
    """What mixes in each layer as its tensors show: (linear_attention or full_attention, the tensor)."""
    kinds: dict[int, tuple[str, str]] = {}
    for name in shapes:
        if not (match := LAYER.match(name)) or name.startswith(OTHERS):
            continue
        if match["rest"] in RECURRENT:
            kinds[int(match["i"])] = (LINEAR, name)
        elif match["rest"] in ("self_attn.q_proj.weight", "mixer.q_proj.weight"):
            kinds.setdefault(int(match["i"]), (FULL, name))
    return kinds


def _example(t: Tensors) -> str:
    layer = t.layers[min(t.layers)]
    return layer[min(layer)][0]


def _architecture(t: Tensors) -> str:
    """The marker tensors, most telling first."""
    if any("mamba.A_log" in v and "self_attn.q_proj.weight" in v for v in t.layers.values()):
        return "FalconH1ForCausalLM"
    if t.has("shared_mlp.input_linear.weight") or t.has("block_sparse_moe.input_linear.weight"):
        return "GraniteMoeHybridForCausalLM"
    if t.has("mamba.A_log"):
        return "BambaForCausalLM"
    if found := t.first("mixer.A_log"):
        if len(found[1]) != 1:
            raise UnsupportedModel(
                f"{found[0]} has {len(found[1])} dimensions: Mamba1 models are not implemented"
            )
        others = ("mixer.q_proj.weight", "mixer.up_proj.weight", "mixer.gate.weight")
        return "NemotronHForCausalLM" if any(map(t.has, others)) else "Mamba2ForCausalLM"
    if t.has("self_attn.kv_a_proj_with_mqa.weight"):
        v3 = t.has("mlp.gate.e_score_correction_bias")
        return "DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"
    return _transformer(t)


def _transformer(t: Tensors) -> str:
    if not (t.has("self_attn.q_proj.weight") and t.has("input_layernorm.weight")):
        raise UnsupportedModel(
            f"cannot tell what model this is from its tensors (such as {_example(t)}); "
            "a config.json, or --set 'architectures=[\"NAME\"]', would say it"
        )
    normed = t.has("self_attn.q_norm.weight")
    if t.has("pre_feedforward_layernorm.weight"):
        return "Gemma3ForCausalLM" if normed else "Gemma2ForCausalLM"
    if t.has("block_sparse_moe.gate.weight"):
        return "MixtralForCausalLM"
    if t.has("mlp.shared_expert_gate.weight"):
        return "Qwen2MoeForCausalLM"
    if normed:
        return "Qwen3MoeForCausalLM" if t.has("mlp.gate.weight") else "Qwen3ForCausalLM"
    if t.has("self_attn.q_proj.bias") and not t.has("self_attn.o_proj.bias"):
        return "Qwen2ForCausalLM"
    return "LlamaForCausalLM"


def _attention(t: Tensors, architecture: str) -> None:
    q = t.need("self_attn.q_proj.weight", "mixer.q_proj.weight")
    k = t.need("self_attn.k_proj.weight", "mixer.k_proj.weight")
    if heads := t.get("num_attention_heads"):
        t.put("head_dim", q[1][0] // heads, f"tensor {q[0]} {list(q[1])} / {heads} heads")
    elif inv_freq := t.first("self_attn.rotary_emb.inv_freq"):
        t.size("head_dim", 2 * inv_freq[1][0], inv_freq)
    elif norm := t.first("self_attn.q_norm.weight"):
        t.size("head_dim", norm[1][0], norm)
    else:
        t.put("head_dim", *_guess_head_dim(t, gcd(q[1][0], k[1][0]), architecture))
    dim = t.get("head_dim")
    t.put("num_attention_heads", q[1][0] // dim, f"tensor {q[0]} {list(q[1])} / head_dim {dim}")
    t.put("num_key_value_heads", k[1][0] // dim, f"tensor {k[0]} {list(k[1])} / head_dim {dim}")


def _guess_head_dim(t: Tensors, common: int, architecture: str) -> tuple[int, str]:
    """Only heads x head_dim can be seen; the sizes in use, likeliest first, that divide both q and k."""
    hidden, order = t.get("hidden_size"), list(HEAD_DIMS)
    small = hidden <= 1024 or (architecture == "LlamaForCausalLM" and hidden == 2048)
    if small or t.get("vocab_size") == 49152:
        order.insert(0, 64)
    if architecture == "Gemma2ForCausalLM":
        order.insert(0, 256)
    found = next((d for d in order if common % d == 0), common)
    return (
        found,
        f"default (a usual size that divides the {common} rows q and k have in common; --set head_dim=…)",
    )


def _mla(t: Tensors) -> None:
    """Five shapes, five unknowns: H = (A - B + C) / r; A, B: the rows of q and kv_b; C: the columns of o."""
    q = t.need("self_attn.q_b_proj.weight", "self_attn.q_proj.weight")
    kv_a, latent = t.need("self_attn.kv_a_proj_with_mqa.weight"), t.need("self_attn.kv_a_layernorm.weight")
    kv_b, o = t.need("self_attn.kv_b_proj.weight"), t.need("self_attn.o_proj.weight")
    rank, rope_dim = latent[1][0], kv_a[1][0] - latent[1][0]
    heads, rest = divmod(q[1][0] - kv_b[1][0] + o[1][1], rope_dim) if rope_dim > 0 else (0, 1)
    if rest or heads < 1 or o[1][1] % heads or kv_b[1][0] % heads:
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


def _mamba(t: Tensors, architecture: str) -> None:
    """Everything but how G groups of N states share the conv's extra channels."""
    at = "mamba" if t.has("mamba.A_log") else "mixer"
    a, out, conv = t.need(f"{at}.A_log"), t.need(f"{at}.out_proj.weight"), t.need(f"{at}.conv1d.weight")
    heads, inner = a[1][0], out[1][1]
    t.size("mamba_n_heads", heads, a)
    if architecture == "Mamba2ForCausalLM":
        t.size("head_dim", inner // heads, out)
        t.size("num_heads", heads, a)
    t.size("mamba_d_head", inner // heads, out)
    t.size("mamba_d_conv", conv[1][-1], conv)
    both = (conv[1][0] - inner) // 2
    if groups := t.get("mamba_n_groups"):
        t.size("mamba_d_state", both // groups, conv)
    usual = 256 if architecture in ("FalconH1ForCausalLM",) else 128
    state = t.get("mamba_d_state") or (usual if both % usual == 0 else both)
    t.default("mamba_d_state", state, f"groups x states is {both}; --set mamba_d_state=…")
    t.default("mamba_n_groups", both // state, f"groups x states is {both}; --set mamba_n_groups=…")
    if architecture == "FalconH1ForCausalLM":
        t.size("mamba_d_ssm", inner, out)
        t.put("mamba_rms_norm", t.has("mamba.norm.weight"), "whether the tensor mamba.norm.weight is there")
    _layer_types(t)


def _layer_types(t: Tensors) -> None:
    if any(t.known.get(k) for k in ("attn_layer_indices", "hybrid_override_pattern")):
        return
    kinds = []
    for i in sorted(t.layers):
        layer = t.layers[i]
        both = "mamba.A_log" in layer and "self_attn.q_proj.weight" in layer
        kinds.append("hybrid" if both else _kind(layer))
    t.put("layer_types", kinds, "the tensors of each layer")


def _kind(layer: Mapping[str, Any]) -> str:
    if "mamba.A_log" in layer or "mixer.A_log" in layer:
        return LINEAR
    if "mixer.gate.weight" in layer:
        return "moe"
    return "mlp" if "mixer.up_proj.weight" in layer else FULL


def _feed_forward(t: Tensors) -> None:
    names = ("mlp.gate_proj.weight", "feed_forward.gate_proj.weight", "mixer.up_proj.weight")
    if found := t.first(*names):
        t.size("intermediate_size", found[1][0], found)
    if found := t.first("shared_mlp.output_linear.weight"):
        t.size("shared_intermediate_size", found[1][1], found)


def _experts(t: Tensors, architecture: str) -> None:
    gates = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "block_sparse_moe.router.layer.weight")
    if not (gate := t.first(*gates, "mixer.gate.weight")):
        return
    t.size("num_experts", gate[1][0], gate)
    one = (
        "mlp.experts.0.up_proj.weight",
        "block_sparse_moe.experts.0.w3.weight",
        "mixer.experts.0.up_proj.weight",
    )
    many = ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight", "mixer.experts.down_proj")
    if found := t.first(*one):
        t.size("moe_intermediate_size", found[1][0], found)
    elif found := t.first(*many):
        t.size("moe_intermediate_size", found[1][-1], found)
    shared = ("mlp.shared_expert.up_proj.weight", "mixer.shared_experts.up_proj.weight")
    if found := t.first(*shared):
        t.size("shared_intermediate_size", found[1][0], found)
    if (found := t.first("mlp.shared_experts.up_proj.weight")) and t.get("moe_intermediate_size"):
        t.size("n_shared_experts", found[1][0] // t.get("moe_intermediate_size"), found)
    if not any(
        t.known.get(k) is not None for k in ("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq")
    ):
        sparse = ["sparse" if any(g in t.layers[i] for g in gates) else "dense" for i in sorted(t.layers)]
        t.put("mlp_layer_types", sparse, "the tensors of each layer")
    count = gate[1][0]
    t.default(
        "num_experts_per_tok", TOP_K.get(count, 2), f"usual for {count} experts; --set num_experts_per_tok=…"
    )


def _defaults(t: Tensors, architecture: str) -> None:
    """What no shape tells, by architecture and vocabulary."""
    vocab, hidden = t.get("vocab_size"), t.get("hidden_size")
    rope_known = any(t.known.get(k) for k in ("rope_parameters", "rope_scaling"))
    if architecture == "LlamaForCausalLM":
        theta, longest = LLAMA_VOCABULARIES.get(vocab, (1e4, 4096))
        t.default("norm_eps", 1e-5, "usual for Llama")
        t.default("rope_theta", theta, f"usual for a vocabulary of {vocab}")
        t.default("max_position_embeddings", longest, f"usual for a vocabulary of {vocab}")
        if vocab == 128256 and not rope_known:
            factor = 32.0 if hidden <= 3072 else 8.0
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
            scaling["original_max_position_embeddings"] = 8192
            t.default("rope_scaling", scaling, "Llama 3.1 and later")
    elif architecture.startswith("Qwen"):
        t.default("rope_theta", 1e6, "usual for Qwen")
        t.default("max_position_embeddings", 32768)
        t.default("norm_topk_prob", architecture.startswith("Qwen3"), "usual for this family")
    elif architecture.startswith("Gemma"):
        t.default("query_pre_attn_scalar", t.get("head_dim"), "the head size; not so for the 27B models")
        small = 512 if hidden <= 1152 else 1024
        t.default(
            "sliding_window", 4096 if architecture.startswith("Gemma2") else small, "usual for its size"
        )
    elif architecture.startswith("Deepseek"):
        _deepseek_defaults(t, architecture, rope_known)
    elif architecture.startswith("FalconH1"):
        t.default("rope_theta", 1e11, "usual for Falcon-H1")
        t.default("mlp_multipliers", [1.0, 1.0], "the tensors do not hold the muP multipliers; --set each")
    elif architecture.startswith("Granite"):
        t.default("attention_multiplier", 1.0, "the tensors do not hold Granite's multipliers; --set each")
        t.default("position_embedding_type", "nope", "usual for Granite 4")
    if architecture not in ("Mamba2ForCausalLM", "Gemma3ForCausalLM"):
        t.default("max_position_embeddings", 4096)


def _deepseek_defaults(t: Tensors, architecture: str, rope_known: bool) -> None:
    count, v3 = t.get("num_experts"), architecture.startswith("DeepseekV3")
    mscale = {129280: 1.0, 102400: 0.707}.get(t.get("vocab_size"))
    if mscale and not rope_known:
        t.default("rope_scaling", {**YARN_DEEPSEEK, "mscale": mscale, "mscale_all_dim": mscale}, "usual")
        t.default("max_position_embeddings", 163_840, "usual for DeepSeek")
    groups = {256: (8, 4), 160: (8, 3)}.get(count, (1, 1))
    t.default("n_group", groups[0], f"usual for {count} experts")
    t.default("topk_group", groups[1], f"usual for {count} experts")
    if not v3:
        t.default("topk_method", "group_limited_greedy" if groups[0] > 1 else "greedy", "usual")
        t.default("routed_scaling_factor", 16.0 if count == 160 else 1.0, f"usual for {count} experts")
