"""Nemotron-H and Nemotron 3: one mixer per layer, without positions; a head of two layers for drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import MAMBA2, HfConfig, Values
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import either, expert_tensors, mamba_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mamba2, model, norm, sigmoid_router
from plait.families.config.aliases import ALIASES
from plait.families.config.blocks import KIND
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, head_size, join_shared_experts
from plait.spec.model import BranchSpec, Mixer, MlpSpec, ModelSpec, MoeSpec, MtpSpec
from plait.spec.recurrent import Mamba2Spec

# Of mtp_hybrid_override_pattern, and of mtp_block_configs.
MTP_LAYERS = {"*": FULL, "E": "moe", "-": "mlp", "attention": FULL, "moe": "moe", "mlp": "mlp"}
# What the blocks of a Puzzle may have otherwise than others.
OF_BLOCK = (
    *("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "shared_intermediate_size"),
    *("num_experts", "num_shared_experts", "moe_latent_size", "sliding_window", "num_key_value_heads"),
)


def _hf_nemotron(config: Config, spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(Mamba2Spec))
    words = {LINEAR: "linear_attention", FULL: "full_attention"}
    return {
        "mamba_head_dim": mixer.head_dim,
        "expand": mixer.num_heads * mixer.head_dim // spec.hidden_size,
        "layers_block_type": [words.get(kind, kind) for kind in config["layer_types"]],
    }


@family(
    *("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
    model_types=("nemotron_h", "nemotron_h_puzzle"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "head_dim": 128,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 128,
        "routed_scaling_factor": 1.0,
    },
    honours=("moe_latent_size",),
    detection=Detection(
        markers=(
            Marker(("mixer.up_proj.weight",), order=100),
            Marker(("mixer.q_proj.weight",), order=110),
            Marker(("mixer.gate.weight",), order=120),
        ),
        kinds={"mixer.q_proj.weight": FULL},
    ),
    hf=HfConfig(
        words={
            **MAMBA2,
            "hidden_act": "mlp_hidden_act",
            "layer_types": "layers_block_type",
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "shared_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
        },
        lists_layers=True,
        extra=_hf_nemotron,
    ),
)
def nemotron_h(c: Config) -> tuple[ModelSpec, NameMap]:
    """Nemotron-H, Nemotron 3: one mixer per layer (Mamba2, attention, MLP or experts), no positions.

    In Nemotron 3 Puzzle each block of experts has a size, and a number of experts for a token, of its own.

    Step sizes are held to `time_step_limit` (0 to infinity in the published configs), as in NVIDIA's own
    modeling code. transformers holds them above `time_step_min` instead, a value that the initialisation
    uses. So its logits differ where a step size falls below 0.001.
    """
    if c.get("mamba_hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"mamba_hidden_act {c['mamba_hidden_act']!r} is not implemented; known: silu")
    each, kinds = norm(c), c["layer_types"]
    blocks = c.get("block_configs") or [{} for _ in kinds]
    mixers = [_nemotron_mixer(_of_block(c, block), kind) for block, kind in zip(blocks, kinds, strict=True)]
    layers = [(BranchSpec("mix", mixer, each),) for mixer in mixers]
    prefixes = ("backbone.", "model.")
    names = either(*(_nemotron_names(p, c.get("num_experts") or 0) for p in prefixes))
    mtp, head = _nemotron_mtp(c)
    # Its layers draft a second token; the model is whole without them.
    return model(c, "nemotron_h", layers, mtp=mtp), NameMap(
        names, head, ignored=unused_patterns(c, r"^mtp\.")
    )


def _nemotron_mtp(c: Config) -> tuple[MtpSpec | None, Rules]:
    """Nemotron 3's head: the last of its layers carries the norm behind them."""
    blocks = _head_blocks(c)
    kinds = [MTP_LAYERS.get(str(block.get(KIND))) for block in blocks]
    if not blocks or None in kinds or ("moe" in kinds and not c.get("num_experts")):
        return None, {}
    mixers = [_nemotron_mixer(_of_block(c, b), str(kind)) for b, kind in zip(blocks, kinds, strict=True)]
    layers = tuple((BranchSpec("mix", mixer, norm(c)),) for mixer in mixers)
    parts = {**deepseek_parts("mtp.layers.0"), "norm": f"mtp.layers.{len(layers) - 1}.final_layernorm"}
    return MtpSpec(layers, norm(c)), mtp_names(parts, _nemotron_names("mtp.", c.get("num_experts") or 0))


def _head_blocks(c: Config) -> Sequence[Mapping[str, object]]:
    """What the head's layers are, one by one, with sizes of their own in a Puzzle; nothing without a head."""
    if blocks := c.get("mtp_block_configs"):
        return list(blocks)
    if not (c.get("num_nextn_predict_layers") or c.get("mtp_hybrid_override_pattern")):
        return []
    return [{KIND: letter} for letter in str(c.get("mtp_hybrid_override_pattern") or "*E")]


def _of_block(c: Config, block: Mapping[str, object]) -> Config:
    """The config with what one block says otherwise. Raises UnsupportedModel for a key that is not of it."""
    ours = {other: key for key in OF_BLOCK for other in (key, *ALIASES.get(key, ()))}
    values = {key: value for key, value in block.items() if key != KIND and value is not None}
    if odd := sorted(key for key in values if key not in ours):
        raise UnsupportedModel(
            f"block_configs: {odd[0]} = {values[odd[0]]!r} of one block is not implemented; known: "
            f"{', '.join(ours)}"
        )
    own = c | {ours[key]: value for key, value in values.items()}
    if own.get("num_experts") != c.get("num_experts"):
        raise UnsupportedModel(
            f"block_configs: {own['num_experts']} experts in one block and {c['num_experts']} in another are "
            "not implemented; all blocks must have as many"
        )
    return own


def _nemotron_mixer(c: Config, kind: str) -> Mixer:
    def plain(size: int) -> MlpSpec:
        return MlpSpec(size, c["hidden_act"], gated=False)

    match kind:
        case "linear_attention":
            return mamba2(c)
        case "mlp":
            return plain(c["intermediate_size"])
        case "moe":
            shared = c.get("num_shared_experts", 1)
            both = plain(c["shared_intermediate_size"] * shared) if shared else None
            return MoeSpec(
                c["num_experts"],
                c["num_experts_per_tok"],
                plain(c["moe_intermediate_size"]),
                sigmoid_router(c),
                shared=both,
                latent=c.get("moe_latent_size"),
            )
        case _:
            return gqa(c, kind, rope=None, window=c.get("sliding_window"))


def _nemotron_names(prefix: str, experts: int) -> Rules:
    ours, layer = "layers.{i}.mix", f"{prefix}layers.{{i}}"
    mixer = f"{layer}.mixer"
    return {
        "embed": (f"{prefix}embeddings", f"{prefix}embed_tokens"),
        "norm": f"{prefix}norm_f",
        "head": "lm_head",
        f"{ours}.norm": f"{layer}.norm",
        **mamba_tensors(ours, mixer),
        f"{ours}.router_bias": (
            f"{mixer}.gate.e_score_correction_bias",
            f"{mixer}.gate.e_score_correction.bias",
        ),
        f"{ours}.router": f"{mixer}.gate",
        **(expert_tensors(ours, mixer, experts, gated=False) if experts else {}),
        f"{ours}.shared.{{x}}": f"{mixer}.shared_experts.{{x}}_proj",
        f"{ours}.enter": f"{mixer}.fc1_latent_proj",
        f"{ours}.leave": f"{mixer}.fc2_latent_proj",
        f"{ours}.{{x}}": f"{mixer}.{{x}}_proj",
    }


def _latent_names(c: Config) -> Rules:
    ends = (("enter", "down"), ("leave", "up"))
    return {f"layers.{{i}}.mix.{ours}": f"blk.{{i}}.ffn_latent_{theirs}" for ours, theirs in ends}


def _nemotron_in_gguf(m: Metadata) -> None:
    head_size(m)
    _list_sizes(m)
    if m.config.get("num_experts"):
        check_router(m, "sigmoid", renormalizes=None)
        join_shared_experts(m)


def _list_sizes(m: Metadata) -> None:
    """Of a Puzzle, what its blocks have otherwise, as its config.json says it."""
    kinds = m.config["layer_types"]
    lists = {key: m.config.pop(f"{key}_by_layer", None) for key in ("num_experts_per_tok", *FEEDS)}
    if not any(sizes and len({size for size in sizes if size}) > 1 for sizes in lists.values()):
        return
    used, experts, plain = (sizes or [None] * len(kinds) for sizes in lists.values())
    if not len(used) == len(experts) == len(plain) == len(kinds):
        raise UnsupportedModel(f"{m.prefix}: lists of sizes are not of {len(kinds)} layers")
    blocks = list[dict[str, object]]()
    for kind, chosen, size, width in zip(kinds, used, experts, plain, strict=True):
        own = {"num_experts_per_tok": chosen, "moe_intermediate_size": size} if kind == "moe" else {}
        own |= {"intermediate_size": width} if kind == "mlp" else {}
        blocks.append({KIND: kind, **own})
    m.put("block_configs", blocks, f"{FILE} {', '.join(m.prefix + key for key in BY_LAYER)}")


FEEDS = ("moe_intermediate_size", "intermediate_size")
BY_LAYER = {
    "expert_used_count": "num_experts_per_tok_by_layer",
    "expert_feed_forward_length": "moe_intermediate_size_by_layer",
    "feed_forward_length": "intermediate_size_by_layer",
}
for _name in ("nemotron_h", "nemotron_h_moe"):
    gguf_arch(_name, "NemotronHForCausalLM", names=_latent_names, by_layer=BY_LAYER)(_nemotron_in_gguf)
