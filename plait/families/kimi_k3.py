"""Kimi-K3 (text): Kimi-Linear with attention residuals, gated latent attention, experts in a latent space."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.depth import LAST
from plait.families.common.detection import Detection, Marker
from plait.families.common.hyper import move_inside
from plait.families.common.registry import family
from plait.families.config.normalize import LINEAR, Config
from plait.families.deepseek import latent_sizes
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.families.gguf.names import usual_names
from plait.families.kimi import ATTN, FFN, KDA, SITU, B, build_kimi, kimi_gguf_names
from plait.families.linear_attention import linear_layers
from plait.spec.model import ModelSpec


@family(
    *("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"),
    model_types=("kimi_k3",),
    defaults={
        **SITU,
        "norm_eps": 1e-5,
        "hidden_act": "situ",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 2,
        "linear_head_dim": 128,
        "linear_num_heads": 96,
        "linear_conv_kernel_dim": 4,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
    },
    honours=("linear_attn_config",),
    detection=Detection(
        markers=(Marker(("self_attention_res_proj.weight",), order=175, architecture="KimiK3ForCausalLM"),),
        kinds={"self_attn.A_log": LINEAR},
        usual={"max_position_embeddings": 1_048_576},
    ),
)
def kimi_k3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Kimi-K3. How many layers a block has is in no tensor, so a config has to say that."""
    _ = c["attn_res_block_size"]
    return build_kimi(c, "kimi_k3")


def _gguf_names(c: Config) -> Rules:
    """What scores blocks of layers is one vector, made of a norm's weight and a projection."""
    inside: dict[str, Source | tuple[Source, ...]] = {
        **usual_names(c),
        **kimi_gguf_names(c),
        f"{KDA}.gate": f"{B}.ssm_g",
        f"{ATTN}.out_gate": f"{B}.attn_gate",
        f"{FFN}.enter": f"{B}.ffn_routed_down",
        f"{FFN}.leave": f"{B}.ffn_routed_up",
        f"{FFN}.latent_norm": f"{B}.ffn_routed_norm",
    }
    return {
        **{f"{ours}.source": f"{B}.attn_res_score.weight" for ours in (KDA, ATTN)},
        f"{FFN}.source": f"{B}.ffn_res_score.weight",
        f"layers.{{i}}.{LAST}.source": "output_res_score.weight",
        **move_inside(inside, ("delta", "attn", "ffn")),
    }


@gguf_arch("kimi-k3", "KimiK3ForCausalLM", names=_gguf_names, is_written=False)
def _kimi_k3_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=None)
    latent_sizes(m)
    linear_layers(m, "ssm_a")
    m.take("linear_head_dim", "kda.head_dim")
    m.size("linear_num_heads", "ssm_beta.weight", 0)
    m.put("linear_conv_kernel_dim", m.config["mamba_d_conv"], f"{FILE} {m.prefix}ssm.conv_kernel")
    nested = {"gate_lower_bound": m.values.get("kda.gate_lower_bound"), "use_full_rank_gate": True}
    m.put("linear_attn_config", nested, f"{FILE} {m.prefix}kda.gate_lower_bound")
    m.take("attn_res_block_size", "attn_res.block_size")
    for key in SITU:
        m.take(key, key.replace("activation_", "activation."))
    m.take("routed_expert_hidden_size", "expert_latent_length", None)
    for key, tensor in (("latent_moe_use_norm", "ffn_routed_norm"), ("mla_use_output_gate", "attn_gate")):
        m.put(key, any(m.layers(f"{tensor}.weight")), "the tensors of each layer")
