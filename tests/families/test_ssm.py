"""State spaces and short convolutions: what is shared, what other projects' files say, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.decoder import Decoder
from plait.quant.encode import find_encoder
from plait.spec.model import AsideSpec, MlpSpec, MoeSpec, NormSpec, RouterSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import Mamba1Spec
from tests.families import tiny
from tests.families.as_gguf import converted
from tests.families.every import as_state_spaces
from tests.families.parity import CPU, LONGEST, Memory, decoder, resolved, whole, worst
from tests.families.plamo2_oracle import CONFIG, checkpoint
from tests.families.test_plamo2 import IDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssm")


def made(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Tensor]]]:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    return tiny.read(folder / name)


def built(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[Decoder, int]:
    """(the model, the bytes of its weights)."""
    found = resolved(Memory(tensors), config)
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    model = Decoder(found.spec, Weights(Memory(tensors), found.names, target))
    return model, target.weights_nbytes


def test_a_shared_block_is_in_memory_once(folder: Path) -> None:
    config, tensors, _ = made("zamba2", folder)
    model, nbytes = built(config, tensors)
    first, second, third = (branch.aside for branch in model.branches if branch.aside)
    assert first.block is third.block
    assert first.block is not second.block
    assert len({*first.states, *second.states, *third.states}) == 3  # keys and values are each layer's own
    head = tensors["model.embed_tokens.weight"]  # a tied head is counted with the table it reads
    stored = sum(w.numel() for w in tensors.values()) + head.numel()
    assert abs(nbytes - 4 * stored) <= 4 * head.numel()


def test_copies_of_shared_blocks_change_nothing(folder: Path) -> None:
    config, tensors, oracle = made("zamba2", folder)
    own = "model.layers.0.shared_transformer."
    copies = {n.replace(own, own.replace("0", "2")): w for n, w in tensors.items() if n.startswith(own)}
    checkpoint = Memory(tensors | copies)
    model = decoder(resolved(checkpoint, config), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_mamba_in_the_format_of_state_spaces(folder: Path) -> None:
    config, tensors, oracle = made("mamba", folder)
    original, stored = as_state_spaces(config, tensors)
    theirs = Memory(stored)
    model = decoder(resolved(theirs, original), theirs)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def test_a_config_that_names_its_model_is_not_taken_for_that_format(folder: Path) -> None:
    config, tensors, _ = made("mamba", folder)
    plain = resolved(Memory(tensors), config).spec
    assert resolved(Memory(tensors), {**config, "ssm_cfg": {}, "d_model": 32}).spec == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba", "hidden_act": "gelu"}, r"hidden_act 'gelu'.*mamba"),
        ({"model_type": "jamba", "hidden_act": "relu"}, r"hidden_act 'relu'.*Jamba"),
        ({"model_type": "jamba", "mamba_inner_layernorms": False}, "mamba_inner_layernorms = False"),
        ({"model_type": "zamba2", "use_long_context": True}, "use_long_context = True"),
        ({"model_type": "lfm2", "block_use_swiglu": False}, "block_use_swiglu = False"),
        ({"model_type": "plamo2", "linear_type": "fp8"}, "linear_type = 'fp8'"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, r"ssm_cfg\.layer = 'Mamba3'"),
        ({"ssm_cfg": {"ngroups": 2}}, r"ssm_cfg has \['ngroups'\]"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 32, "vocab_size": 97, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(UnsupportedModel, match=message):
        build_spec(
            {**sizes, "num_hidden_layers": 54 if config.get("model_type") == "zamba2" else 3, **config}
        )


def test_experts_that_llama_cpp_chooses_otherwise_are_refused(folder: Path) -> None:
    config, tensors, _ = made("lfm2_moe", folder)
    metadata, stored = converted("lfm2moe", config, tensors)
    with pytest.raises(UnsupportedModel, match="expert_gating_func 1"):
        resolved(Memory(stored), gguf={**metadata, "lfm2moe.expert_gating_func": 1})


def test_blocks_stay_blocks_when_their_rows_change_places() -> None:
    """PLaMo 2 mixes the rows of heads, of q, k and v, of B, C and steps: none of them is decoded for that."""
    tensors = checkpoint({**CONFIG, "intermediate_size": 64})
    packed, near = dict[str, Any](tensors), dict(tensors)
    for name, w in tensors.items():
        how = find_encoder("q8_0", w.shape[1]) if w.ndim == 2 and "proj" in name else None
        if how:
            packed[name] = how(w, name, 1)
            near[name] = packed[name].dequantize(torch.float32)
    config = {**CONFIG, "intermediate_size": 64}
    model, nbytes = built(config, packed)
    plain, plain_nbytes = built(config, near)
    assert nbytes < 0.6 * plain_nbytes
    assert worst(whole(model, IDS[0]), whole(plain, IDS[0])) <= 1e-4


# Configs as published models have them.
LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "norm_eps": 1e-5,
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_heads": 32,
    "use_pos_enc": True,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "tie_embedding": True,
}
JAMBA_52B = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "vocab_size": 65536,
    "hidden_act": "silu",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
ZAMBA2_1_2B = {
    "architectures": ["Zamba2ForCausalLM"],
    "model_type": "zamba2",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "adapter_rank": 128,
    "add_bias_linear": False,
    "attention_head_dim": 128,
    "attention_hidden_size": 4096,
    "chunk_size": 256,
    "ffn_hidden_size": 8192,
    "gated_linear_unit": True,
    "hidden_act": "gelu",
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35],
    "intermediate_size": 8192,
    "kv_channels": 64,
    "layers_block_type": ["hybrid" if i % 6 == 5 else "mamba" for i in range(38)],
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "n_mamba_heads": 64,
    "num_attention_heads": 32,
    "num_hidden_layers": 38,
    "num_key_value_heads": 32,
    "num_mem_blocks": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "use_long_context": False,
    "use_mem_rope": True,
    "use_shared_attention_adapter": True,
}
FALCON_MAMBA_7B = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "vocab_size": 65024,
    "conv_kernel": 4,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-5,
    "num_hidden_layers": 64,
    "state_size": 16,
    "time_step_rank": 256,
    "residual_in_fp32": True,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
}
PLAMO_2_1B = {
    "architectures": ["Plamo2ForCausalLM"],
    "model_type": "plamo2",
    "vocab_size": 100000,
    "hidden_size": 2048,
    "attention_window_size": 2048,
    "full_attention_idx": [],
    "hidden_size_per_head": 128,
    "intermediate_size": 8192,
    "linear_type": "normal",
    "mamba_chunk_size": 256,
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_enabled": True,
    "mamba_num_heads": 32,
    "mamba_step": 2,
    "max_position_embeddings": 10485760,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "sliding_window": 2048,
    "tie_word_embeddings": True,
}


def pattern(config: dict[str, Any]) -> str:
    """The first letters of the mixers, a layer each."""
    return "".join(layer[0].name[0] for layer in build_spec(config)[0].layers)


def test_published_configs_name_their_layers() -> None:
    assert pattern(LFM2_1_2B) == "ccaccaccacacacac"
    assert pattern(JAMBA_52B) == "ssssasss" * 4
    assert pattern(PLAMO_2_1B) == "sa" * 8
    assert pattern(FALCON_MAMBA_7B) == "s" * 64
    blocks = [layer[0].aside for layer in build_spec(ZAMBA2_1_2B)[0].layers]
    assert [i for i, block in enumerate(blocks) if block] == [5, 11, 17, 23, 29, 35]


def test_published_configs_give_their_sizes() -> None:
    lfm2 = build_spec(LFM2_1_2B)[0]
    assert lfm2.layers[0][1].mixer == MlpSpec(8192)
    assert lfm2.layers[2][0].mixer.rope == RopeSpec(64, 1e6)  # type: ignore[union-attr]
    jamba = build_spec(JAMBA_52B)[0]
    assert jamba.layers[0][0].mixer == Mamba1Spec(8192, 16, 256, 4, norm=NormSpec(1e-6))
    moe = jamba.layers[1][1].mixer
    assert moe == MoeSpec(16, 2, MlpSpec(14336), RouterSpec(renormalize=False))
    falcon = build_spec(FALCON_MAMBA_7B)[0]
    assert falcon.layers[0][0].mixer == Mamba1Spec(8192, 16, 256, 4, norm=NormSpec(1e-6, weight=False))
    plamo = build_spec(PLAMO_2_1B)[0].layers[0][0].mixer
    assert plamo == Mamba1Spec(4096, 64, 128, 4, norm=NormSpec(1e-6), num_heads=32)
    aside = build_spec(ZAMBA2_1_2B)[0].layers[5][0].aside
    assert aside == AsideSpec(
        *(0, 32, 32, 128, 64**-0.5, RopeSpec(128, 1e4), 8192, "gelu", NormSpec(1e-5), 128),
        adapts_attention=True,
    )


def nemotron_h(folder: Path, limit: tuple[float, float] | None) -> tuple[dict[str, Any], Any, Tensor]:
    """(tensors, ids, logits of transformers), with step sizes down to 1e-4. `limit`: instead of its own."""
    tiny.write("nemotron_h_groups", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mixer, "dt_bias"):
                layer.mixer.dt_bias.copy_(torch.linspace(-9.0, 0.5, layer.mixer.num_heads))
                layer.mixer.time_step_limit = limit or layer.mixer.time_step_limit
    tiny.save(model, folder)
    _, tensors, oracle = tiny.read(folder)
    return tensors, oracle["ids"][0], oracle["logits"][0]


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.3)])
def test_nemotron_h_holds_step_sizes_to_its_time_step_limit(
    tmp_path: Path, limit: tuple[float, float]
) -> None:
    tensors, ids, wanted = nemotron_h(tmp_path, limit)
    config = {**tiny.read(tmp_path)[0], "time_step_limit": list(limit)}
    model = decoder(resolved(Memory(tensors), config), Memory(tensors))
    assert worst(whole(model, ids), wanted) <= 1e-4


def test_nemotron_h_has_no_lower_limit_of_time_step_min_as_transformers_has(tmp_path: Path) -> None:
    tensors, ids, theirs = nemotron_h(tmp_path, None)
    model = decoder(resolved(Memory(tensors), tiny.read(tmp_path)[0]), Memory(tensors))
    assert worst(whole(model, ids), theirs) > 1e-3  # the step sizes above reach below 0.001
