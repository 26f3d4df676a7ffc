"""Sizes of what has a state instead of keys: Mamba 1 and 2, delta rules, lightning, RG-LRU, short convs."""

from __future__ import annotations

from plait.errors import UnsupportedModel
from plait.families.common.registry import families_by_name
from plait.families.common.tensors import Named, Tensors
from plait.families.config.normalize import FULL, LINEAR
from plait.families.detect.markers import layer_words

STATES = {"FalconH1ForCausalLM": 256}  # where 128 is not the usual size
MAMBA = ("mamba", "mixer", "mamba_decoder.mamba")
LAYER_KEYS = ("layer_types", "attn_layer_indices", "hybrid_override_pattern", "attn_layer_period")


def state_sizes(t: Tensors, architecture: str) -> None:
    """Everything that layers with states show, and which layers those are."""
    if (at := next((at for at in MAMBA if t.has(f"{at}.A_log")), None)) is not None:
        if t.has("mixer.dt_norm_weight"):
            _plamo(t)
        elif t.has(f"{at}.x_proj.weight"):
            _mamba1(t, at)
        else:
            _mamba2(t, at, architecture)
    if t.has("linear_attn.A_log"):
        _delta(t, architecture)
    if t.has("self_attn.f_a_proj.weight") or t.has("self_attn.forget_gate.f_a_proj.weight"):
        _kimi_delta(t)
    if gate := t.first("temporal_block.rg_lru.recurrent_param"):
        t.size("lru_width", gate[1][0], gate)
        _last(t, "conv1d_width", t.need("temporal_block.conv_1d.weight"))
    if kernel := t.first("conv.conv.weight"):
        _last(t, "conv_L_cache", kernel)
    own = families_by_name().get(architecture)
    if own is not None:
        own.detection.sizes(t)
    _layer_types(t, architecture)


def _last(t: Tensors, key: str, kernel: Named) -> None:
    """The width of a kernel [channels, 1, width]."""
    t.size(key, kernel[1][-1], kernel)


def _mamba1(t: Tensors, at: str) -> None:
    a, steps = t.need(f"{at}.A_log"), t.need(f"{at}.dt_proj.weight")
    t.size("mamba_d_ssm", a[1][0], a)
    t.size("mamba_d_state", a[1][-1], a)
    t.size("mamba_dt_rank", steps[1][-1], steps)
    _last(t, "mamba_d_conv", t.need(f"{at}.conv1d.weight"))


def _plamo(t: Tensors) -> None:
    a, steps, b = t.need("mixer.A_log"), t.need("mixer.dt_norm_weight"), t.need("mixer.B_norm_weight")
    out = t.need("mixer.out_proj.weight")
    t.size("mamba_n_heads", a[1][0], a)
    t.size("head_dim", out[1][-1] // max(a[1][0], 1), out)
    t.size("mamba_dt_rank", steps[1][0], steps)
    t.size("mamba_d_state", b[1][0], b)
    _last(t, "mamba_d_conv", t.need("mixer.conv1d.weight"))


def _mamba2(t: Tensors, at: str, architecture: str) -> None:
    """Everything but how G groups of N states share the conv's extra channels."""
    a, out, conv = t.need(f"{at}.A_log"), t.need(f"{at}.out_proj.weight"), t.need(f"{at}.conv1d.weight")
    heads, inner = a[1][0], out[1][-1]
    t.size("mamba_n_heads", heads, a)
    if architecture == "Mamba2ForCausalLM":
        t.size("head_dim", inner // heads, out)
        t.size("num_heads", heads, a)
    t.size("mamba_d_head", inner // heads, out)
    _last(t, "mamba_d_conv", conv)
    both = (conv[1][0] - inner) // 2
    if both < 1:
        raise UnsupportedModel(f"{conv[0]} {list(conv[1])} and {out[0]} {list(out[1])} do not fit together")
    if groups := t.get("mamba_n_groups"):
        t.size("mamba_d_state", both // groups, conv)
    own = families_by_name().get(architecture)
    usual = STATES.get(architecture) or (own.detection.usual.get("mamba_d_state") if own else None) or 128
    state = t.get("mamba_d_state") or (usual if both % usual == 0 else both)
    t.default("mamba_d_state", state, f"groups x states is {both}; --set mamba_d_state=…")
    t.default("mamba_n_groups", both // state, f"groups x states is {both}; --set mamba_n_groups=…")
    if architecture == "FalconH1ForCausalLM":
        t.size("mamba_d_ssm", inner, out)
        t.put("mamba_rms_norm", t.has("mamba.norm.weight"), "whether the tensor mamba.norm.weight is there")


def _delta(t: Tensors, architecture: str) -> None:
    """Value heads and their size; key heads and theirs share the rows of q."""
    a = t.need("linear_attn.A_log")
    norm = t.need("linear_attn.norm.weight", "linear_attn.o_norm.weight")
    heads, value = a[1][0], norm[1][0]
    t.size("linear_num_value_heads", heads, a)
    t.size("linear_value_head_dim", value, norm)
    _last(t, "linear_conv_kernel_dim", t.need("linear_attn.conv1d.weight", "linear_attn.q_conv1d.weight"))
    if architecture == "OlmoHybridForCausalLM":
        q = t.need("linear_attn.q_proj.weight")
        rows, usual, why = q[1][0], max(value // 2, 1), "half of a value head, as usual for OLMo"
    else:
        q = t.need("linear_attn.conv1d.weight")
        rows, usual, why = (q[1][0] - heads * value) // 2, value, "as wide as a value head, as usual"
    dim = t.get("linear_key_head_dim") or (usual if rows % usual == 0 else rows)
    t.default("linear_key_head_dim", dim, f"{why}; heads x size is {rows}")
    t.size("linear_num_key_heads", rows // dim, q)


def _kimi_delta(t: Tensors) -> None:
    beta, norm = t.need("self_attn.b_proj.weight"), t.need("self_attn.o_norm.weight")
    t.size("linear_num_heads", beta[1][0], beta)
    t.size("linear_head_dim", norm[1][0], norm)
    _last(t, "linear_conv_kernel_dim", t.need("self_attn.q_conv1d.weight", "self_attn.conv1d.weight"))


def _layer_types(t: Tensors, architecture: str) -> None:
    """One word per layer, where not all layers are the same."""
    if t.is_said(*LAYER_KEYS) or architecture in ("Mamba2ForCausalLM", "MambaForCausalLM"):
        return
    both = architecture == "FalconH1ForCausalLM"
    own = families_by_name().get(architecture)
    marks = {"mamba.A_log": "hybrid"} if both else layer_words()
    marks = dict(own.detection.words) if own and own.detection.words else marks
    if architecture == "NemotronHForCausalLM":
        marks |= {"mixer.gate.weight": "moe", "mixer.up_proj.weight": "mlp"}
    kinds = t.words(marks, FULL)
    if architecture == "RecurrentGemmaForCausalLM":
        words = ["recurrent" if kind == LINEAR else "attention" for kind in kinds]
        t.put("block_types", words, "the tensors of each layer")
    elif set(kinds) != {FULL} or t.has("shared_mlp.input_linear.weight"):
        t.put("layer_types", kinds, "the tensors of each layer")
