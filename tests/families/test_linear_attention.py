"""Families with linear attention: original keys, wrappers, weights that stay quantized, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.families.resolve import resolve
from plait.quant.encode import encoder
from plait.quant.gguf import Gguf
from plait.quant.weight import as_tensor
from plait.spec.model import AttentionSpec, MlaSpec
from plait.spec.recurrent import DeltaNetSpec, LightningSpec, RgLruSpec
from tests.families import tiny, tiny_bare
from tests.families.parity import CPU, Memory, decoder, resolved, whole, worst

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]


def spec_of(architecture: str, **keys: Any) -> Any:
    config = {**TINY, "architectures": [architecture], **keys}
    return resolve(config, {"lm_head.weight": (97, 32)}, read=lambda name: torch.zeros(1)).spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("linear")


def made(name: str, folder: Path) -> Any:
    if not (folder / name).exists():
        tiny.write(name, folder / name)
    return tiny.read(folder / name)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_qwen3_5_inside_its_wrapper_is_qwen3_5(folder: Path, prefix: str) -> None:
    config, tensors, oracle = made("qwen3_5", folder)
    wrapped = {name.replace("model.", prefix, 1): w for name, w in tensors.items()}
    wrapped |= {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.blocks.0.norm1.weight": torch.zeros(2)}
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {**config, "architectures": None, "attn_output_gate": True},
        "vision_config": {"hidden_size": 8},
    }
    checkpoint = Memory(wrapped)
    model = decoder(resolved(checkpoint, outer), checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4


def quantized(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, Any]:
    """The tensors, those with names that end so in Q8_0."""
    return {n: encoder("Q8_0")(w, n, 1) if n.endswith(names) else w for n, w in tensors.items()}


def test_maps_that_are_taken_apart_stay_in_their_blocks(folder: Path) -> None:
    """q and the gate of its attention, and what Qwen3-Next keeps together per key head."""
    config, tensors, _ = made("qwen3_next", folder)
    checkpoint = Memory(quantized(tensors, "q_proj.weight", "in_proj_qkvz.weight", "in_proj_ba.weight"))
    found = resolved(checkpoint, config)
    weights = Weights(checkpoint, found.names, Target(CPU, torch.float32, 16, 32))
    plain = Weights(Memory(tensors), found.names, Target(CPU, torch.float32, 16, 32))
    names = [f"layers.1.attn.{x}.weight" for x in ("q", "gate")]
    names += [f"layers.0.delta.{x}.weight" for x in ("q", "k", "v", "gate", "beta", "decay")]
    for name in names:
        weight, numbers = weights.read(name), plain.read(name)
        assert isinstance(weight, Gguf), name
        assert weight.kind.name == "Q8_0"
        torch.testing.assert_close(as_tensor(weight), numbers, rtol=0.02, atol=0.01)


def test_minimax_text_01_has_other_keys_and_the_same_layers() -> None:
    alphas = {f"layernorm_{kind}_alpha": 3.5 for kind in ("full_attention", "linear_attention", "mlp")}
    betas = {f"layernorm_{kind}_beta": 1.0 for kind in ("full_attention", "linear_attention", "mlp")}
    old = spec_of(
        "MiniMaxText01ForCausalLM",
        **alphas,
        **betas,
        attn_type_list=[0, 1, 0],
        head_dim=16,
        rotary_dim=8,
        rope_theta=1e7,
        num_local_experts=4,
        num_experts_per_tok=2,
        postnorm=True,
        shared_intermediate_size=0,
    )
    kinds = [type(layer[0].mixer) for layer in old.layers]
    assert kinds == [LightningSpec, AttentionSpec, LightningSpec]
    assert {branch.keep for layer in old.layers for branch in layer} == {3.5}
    attention = old.layers[1][0].mixer
    assert (attention.rope.dim, attention.rope.theta) == (8, 1e7)
    assert old.layers[0][0].mixer.slopes[0] == pytest.approx(0.25, rel=1e-4)
    assert old.layers[2][0].mixer.slopes[0] < 1e-5
    new = spec_of(
        "MiniMaxForCausalLM",
        **{f"{kind}_alpha_factor": 3.5 for kind in ("full_attn", "linear_attn", "mlp")},
        layer_types=KINDS,
        head_dim=16,
        rotary_dim=8,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25},  # which nothing reads
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    assert new == old


def test_kimi_linear_counts_layers_from_one() -> None:
    nested = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 3}
    keys = {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        "linear_attn_config": {**nested, "short_conv_kernel_size": 3},
    }
    spec = spec_of("KimiLinearForCausalLM", **keys)
    first, second, third = (layer[0].mixer for layer in spec.layers)
    assert (type(first), type(second), type(third)) == (DeltaNetSpec, MlaSpec, DeltaNetSpec)
    assert (first.num_heads, first.key_dim, first.conv_kernel) == (3, 8, 3)
    assert (second.rope, second.rope_dim) == (None, 4)
    with pytest.raises(UnsupportedModel, match="mla_use_nope = False is not implemented"):
        spec_of("KimiLinearForCausalLM", **keys, mla_use_nope=False)
    with pytest.raises(UnsupportedModel, match="moe_router_activation_func = 'softmax'"):
        spec_of("KimiLinearForCausalLM", **keys, moe_router_activation_func="softmax")
    with pytest.raises(UnsupportedModel, match="does not say which layers are Kimi Delta Attention"):
        spec_of("KimiLinearForCausalLM", **{**keys, "linear_attn_config": {}})


def test_qwen_has_full_attention_in_every_fourth_layer_unless_set() -> None:
    def kinds(**keys: Any) -> str:
        spec = spec_of("Qwen3_5ForCausalLM", num_hidden_layers=6, head_dim=16, **keys)
        return "".join("a" if isinstance(layer[0].mixer, AttentionSpec) else "d" for layer in spec.layers)

    assert kinds() == "dddadd"
    assert kinds(full_attention_interval=2) == "dadada"
    assert kinds(layer_types=["full_attention", *["linear_attention"] * 5]) == "addddd"
    ungated = spec_of("Qwen3_5ForCausalLM", layer_types=KINDS, head_dim=16, attn_output_gate=False)
    assert not ungated.layers[1][0].mixer.gate


def test_recurrent_gemma_goes_round_its_block_types() -> None:
    spec = spec_of("RecurrentGemmaForCausalLM", num_hidden_layers=5)
    assert [type(layer[0].mixer) for layer in spec.layers] == [
        RgLruSpec,
        RgLruSpec,
        AttentionSpec,
        RgLruSpec,
        RgLruSpec,
    ]
    assert spec.layers[2][0].mixer.window == 2048
    assert spec.layers[0][1].mixer.size == 24
    assert spec.embed_scale == 5.65625  # sqrt(32) in bfloat16
    with pytest.raises(UnsupportedModel, match="block_types 'mamba' is not known"):
        spec_of("RecurrentGemmaForCausalLM", block_types=["mamba"])


def test_what_is_not_implemented_is_refused_by_name() -> None:
    minimax = {"layer_types": KINDS, "head_dim": 16, "num_local_experts": 4}
    for said, architecture, keys in (
        ("postnorm = false", "MiniMaxForCausalLM", {**minimax, "postnorm": False}),
        ("shared_intermediate_size", "MiniMaxForCausalLM", {**minimax, "shared_intermediate_size": 8}),
        ("no layer of lightning attention", "MiniMaxForCausalLM", {**minimax, "layer_types": None}),
        ("hidden_act 'relu' after a short convolution", "Qwen3_5ForCausalLM", {"hidden_act": "relu"}),
        ("cannot share 3 linear_num_key_heads", "Qwen3_5ForCausalLM", {"linear_num_key_heads": 3}),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            spec_of(architecture, **keys)


@pytest.mark.parametrize("has_config", [True, False])
def test_kimi_linear_as_transformers_5_keeps_it_in_memory(folder: Path, has_config: bool) -> None:
    """A module for the forget gate, one convolution for q, k and v."""
    tiny.write("kimi_linear", folder / "kimi_in_memory", tiny_bare.VARIANTS["kimi_linear"])
    config, tensors, oracle = tiny.read(folder / "kimi_in_memory")
    theirs = {}
    for name, w in tensors.items():
        place, _, part = name.rpartition("self_attn.")
        gate = part.startswith(("f_a_proj", "f_b_proj", "dt_bias", "A_log"))
        theirs[f"{place}self_attn.forget_gate.{part}" if gate else name] = w
    for name in [n for n in theirs if n.endswith("q_conv1d.weight")]:
        place = name.removesuffix("q_conv1d.weight")
        theirs[f"{place}conv1d.weight"] = torch.cat([theirs.pop(f"{place}{x}_conv1d.weight") for x in "qkv"])
    assert sum("forget_gate" in name for name in theirs) == 8
    checkpoint = Memory(theirs)
    said = config if has_config else None
    right = [] if has_config else ["num_experts_per_tok=2", "routed_scaling_factor=2.446"]
    found = resolved(checkpoint, said, right)
    assert found.config["layer_types"] == KINDS
    assert worst(whole(decoder(found, checkpoint), oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
