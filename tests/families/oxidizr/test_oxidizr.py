"""oxidizr checkpoints in every naming, with a config, a part of one or none, and with errors in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import (
    ConfigError,
    MissingTensor,
    PlaitError,
    ShapeMismatch,
    UnsupportedModel,
    UnusedTensor,
)
from plait.families.oxidizr.config import parse_override
from plait.families.oxidizr.oxidizr import is_oxidizr
from plait.spec.model import AttentionSpec, MlaSpec, MlpSpec, MoeSpec
from plait.spec.recurrent import Mamba1Spec, Mamba2Spec, Mamba3Spec
from tests.families.oxidizr.oxidizr_checkpoint import (
    DENSE,
    HYBRID,
    HYBRID_CONFIG,
    Run,
    ends,
    golden,
    gqa,
    logits,
    mamba2_layer,
    mla,
    moe,
    norms,
    resolve,
    swiglu,
    zoo,
)

Model = dict[str, Tensor]


def prefixed(tensors: Mapping[str, Tensor]) -> Model:
    return {name if name.startswith("lm_head") else f"model.{name}": t for name, t in tensors.items()}


def renamed(tensors: Mapping[str, Tensor], rules: dict[str, str]) -> Model:
    out = {}
    for name, tensor in tensors.items():
        for pattern, new in rules.items():
            name = re.sub(pattern, new, name)
        out[name] = tensor
    return out


def as_documented(tensors: Mapping[str, Tensor]) -> Model:
    """Convention B: `mamba.*`, MLA in DeepSeek's four matrices under `attn.`, experts without a `moe.`."""
    out = renamed(
        tensors,
        {
            r"mamba2\.mixer\.": "mamba.",
            r"mamba2\.norm": "norm",
            r"moe\.router\.gate": "gate",
            r"moe\.": "",
            r"self_attn\.o_proj": "attn.o_proj",
        },
    )
    at, heads, dim, turned, low = "layers.1.self_attn.w_", 2, 4, 4, 6
    w = {x: out.pop(f"{at}{x}.weight") for x in ("dkv", "dq", "uq", "uk", "uv", "qr", "kr")}
    q_b = torch.zeros(heads, dim + turned, low + heads * turned, dtype=torch.float64)
    for h in range(heads):  # the rotary part passes through the query's latent unchanged
        q_b[h, :dim, :low] = w["uq"][h * dim : (h + 1) * dim]
        q_b[h, dim:, low + h * turned : low + (h + 1) * turned] = torch.eye(turned)
    kv_b = [m.view(heads, dim, -1) for m in (w["uk"], w["uv"])]
    return {
        **out,
        "layers.1.attn.q_a_proj.weight": torch.cat([w["dq"], w["qr"]]),
        "layers.1.attn.q_b_proj.weight": q_b.flatten(0, 1),
        "layers.1.attn.kv_a_proj_with_mqa.weight": torch.cat([w["dkv"], w["kr"]]),
        "layers.1.attn.kv_b_proj.weight": torch.cat(kv_b, 1).flatten(0, 1),
    }


def as_framework(tensors: Mapping[str, Tensor]) -> Model:
    """Convention C: `mixer.*` behind `input_layernorm`, experts stacked as [E, in, out]."""
    out = renamed(
        tensors,
        {
            r"mamba2\.mixer\.": "mixer.",
            r"mamba2\.norm": "input_layernorm",
            r"moe\.router\.": "block_sparse_moe.",
            r"moe\.shared": "block_sparse_moe.shared",
        },
    )
    for x in ("gate", "up", "down"):
        experts = [out.pop(f"layers.1.moe.experts.{e}.{x}_proj.weight").T for e in range(3)]
        out[f"layers.1.block_sparse_moe.experts.{x}_proj.weight"] = torch.stack(experts)
    return out


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("convention", ["A", "B", "C"])
@pytest.mark.parametrize("config", [HYBRID_CONFIG, None])
def test_every_convention_is_the_same_model(convention: str, prefix: bool, config: Any) -> None:
    tensors = golden(HYBRID)
    want = logits(resolve(HYBRID_CONFIG, tensors, a_source="saved"), tensors)
    told = {"A": dict, "B": as_documented, "C": as_framework}[convention](tensors)
    told = prefixed(told) if prefix else told
    if convention == "B" and config:  # its query latent is wider: that of the trainer's passes through it
        config = {**config, "q_latent_dim": None}
    assert is_oxidizr(config, told)
    torch.testing.assert_close(logits(resolve(config, told, a_source="saved"), told), want, atol=2e-5, rtol=0)


def test_a_router_named_moe_gate_and_experts_as_linear_layers() -> None:
    tensors = golden(HYBRID)
    want = logits(resolve(None, tensors), tensors)
    told = renamed(tensors, {r"moe\.router\.gate": "moe.gate"})
    torch.testing.assert_close(logits(resolve(None, told), told), want)
    stacked = as_framework(tensors)
    for x in ("gate", "up", "down"):
        name = f"layers.1.block_sparse_moe.experts.{x}_proj.weight"
        stacked[name] = stacked[name].mT.contiguous()
    torch.testing.assert_close(logits(resolve(None, stacked, a_source="trainer"), stacked), want)


def test_without_a_config_every_size_comes_from_the_tensors() -> None:
    tensors = golden(HYBRID)
    full, bare = resolve(HYBRID_CONFIG, tensors), resolve(None, tensors)
    assert bare.spec.layers[0][0].mixer == Mamba2Spec(
        4,
        4,
        3,
        1,
        4,
        chunk_size=256,
        dt_limit=(1e-3, 0.1),
        gated_norm=full.spec.layers[0][0].mixer.gated_norm,
    )
    assert bare.spec.layers[1] == full.spec.layers[1]
    assert (bare.spec.hidden_size, bare.spec.vocab_size, bare.spec.max_len) == (8, 11, 4096)
    # A scan in other chunks has other roundings: the config is compared with chunks as long as the default's.
    chunks = resolve({**HYBRID_CONFIG, "mamba2_chunk_size": 256}, tensors)
    assert torch.equal(logits(bare, tensors), logits(chunks, tensors))
    assert bare.provenance["mamba2_state_size"] == "tensor layers.0.mamba2.mixer.conv1d.weight [22, 1, 4]"
    assert bare.provenance["kv_latent_dim"] == "tensor layers.1.self_attn.w_dkv.weight [4, 8]"
    assert bare.provenance["experts_per_tok"].startswith("default (2")
    assert bare.provenance["max_seq_len"] == "default (4096)"
    assert full.provenance["max_seq_len"] == "config.json"
    assert full.config["layer_types"] == ["Mamba2", "MlaWithMoe"]


@pytest.mark.parametrize("lost", [k for k in HYBRID_CONFIG if k not in ("max_seq_len", "mamba2_chunk_size")])
def test_any_one_key_may_be_missing(lost: str) -> None:
    tensors = golden(HYBRID)
    config = {k: v for k, v in HYBRID_CONFIG.items() if k != lost}
    assert resolve(config, tensors).spec == resolve(HYBRID_CONFIG, tensors).spec


def test_groups_are_found_with_the_state_size() -> None:
    """The trainer's config.json loses `mamba2_n_groups`: 2 groups of 3 states and 1 of 6 have one shape."""
    tensors = golden({**ends(8, 11), **mamba2_layer(0, 8, 4, 4, 3, groups=2)})
    told = resolve({"mamba2_state_size": 3}, tensors).spec.layers[0][0].mixer
    assert isinstance(told, Mamba2Spec)
    assert (told.num_groups, told.state_size) == (2, 3)
    same = resolve(None, tensors, overrides=("mamba2_n_groups=2",)).spec.layers[0][0].mixer
    assert same == told
    one = resolve(None, tensors).spec.layers[0][0].mixer
    assert isinstance(one, Mamba2Spec)
    assert (one.num_groups, one.state_size) == (1, 6)


def test_layers_of_all_kinds_in_one_model() -> None:
    tensors = golden(zoo())
    resolved = resolve(None, tensors)
    kinds = [tuple(type(branch.mixer) for branch in layer) for layer in resolved.spec.layers]
    assert kinds == [
        (Mamba1Spec,), (Mamba2Spec,), (Mamba3Spec,), (MlaSpec, MlpSpec),
        (AttentionSpec, MoeSpec), (MlaSpec, MoeSpec), (Mamba2Spec, MlpSpec)
    ]  # fmt: skip
    assert resolved.config["mamba_layers"] == [0, 1, 2, 6]
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    want = logits(resolved, tensors, ids)
    run = Run(resolved, tensors)
    with torch.inference_mode():
        pieces = [run.feed((0, ids[a:b]))[0] for a, b in ((0, 1), (1, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(pieces), want, atol=2e-5, rtol=0)


def test_tied_when_the_head_is_not_there() -> None:
    tensors = golden(HYBRID)
    del tensors["lm_head.weight"]
    resolved = resolve(HYBRID_CONFIG, tensors)
    assert resolved.spec.tied
    assert logits(resolved, tensors).shape == (6, 11)
    with pytest.raises(MissingTensor, match="tie_word_embeddings = false"):
        resolve({**HYBRID_CONFIG, "tie_word_embeddings": False}, tensors)


# ---- where A comes from


def test_a_source_follows_the_file() -> None:
    tensors = golden(HYBRID)
    name = "layers.0.mamba2.mixer.A_log"
    assert resolve(None, tensors).config["a_source"] == "trainer"  # near 0: drifted, never used
    repaired = {**tensors, name: tensors[name] * 0.1 + torch.arange(1.0, 5.0).log()}
    resolved = resolve(None, repaired)
    assert resolved.config["a_source"] == "saved"
    assert "ln(1 … H)" in resolved.provenance["a_source"]
    asked = resolve(None, repaired, a_source="trainer")
    assert (asked.config["a_source"], asked.provenance["a_source"]) == ("trainer", "option a_source")
    other = as_framework(tensors)
    assert resolve(None, other).config["a_source"] == "saved"  # no name that the trainer gives


# ---- configs in other words


def test_aliases_sections_and_training_files() -> None:
    tensors = golden(HYBRID)
    want = resolve(HYBRID_CONFIG, tensors).spec
    aliased = {
        "num_hidden_layers": 2,
        "num_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
    }
    assert resolve({**aliased, "mamba2_chunk_size": 4}, tensors).spec == want
    document = {
        "model_type": "hybrid", "hidden_size": 8, "num_layers": 2, "vocab_size": 11, "max_seq_len": 64,
        "attention": {"num_heads": 2, "kv_latent_dim": 4, "q_latent_dim": 6, "d_rope": 4, "rope_theta": 1e4},
        "ssm": {"variant": "mamba2", "num_heads": 4, "head_dim": 4, "state_size": 3, "chunk_size": 4},
        "moe": {"num_experts": 3, "experts_per_tok": 2, "shared_expert": True, "intermediate_size": 10},
        "hybrid_layers": {"ssm_layers": [0], "attention_layers": [1]},
    }  # fmt: skip
    assert resolve(document, tensors).spec == want
    assert resolve({"model": HYBRID_CONFIG, "trainer": {"batch_size": 4}}, tensors).spec == want


def test_layer_types_are_held_against_the_tensors() -> None:
    tensors = golden(HYBRID)
    for words in (["Mamba2", "MlaWithMoe"], ["mamba2", "mla_with_moe"], ["mamba", "attention"]):
        assert resolve({"layer_types": words}, tensors).config["layer_types"] == words
    with pytest.raises(UnsupportedModel, match=r"layer_types\[1\] = 'MlaWithMlp', but .*means 'MlaWithMoe'"):
        resolve({"layer_types": ["Mamba2", "MlaWithMlp"]}, tensors)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        resolve({"layer_types": ["Mamba2"]}, tensors)


def test_overrides_win_and_show() -> None:
    tensors = golden(HYBRID)
    resolved = resolve(HYBRID_CONFIG, tensors, overrides=("experts_per_tok=1", "max_position_embeddings=9"))
    assert resolved.spec.layers[1][1].mixer.top_k == 1
    assert (resolved.spec.max_len, resolved.provenance["max_seq_len"]) == (9, "--set")
    with pytest.raises(
        ConfigError, match=r"'experts_per_token' is not a key.*near keys that are read: experts_per_tok"
    ):
        resolve(None, tensors, overrides=("experts_per_token=1",))


def test_an_override_of_a_key_that_no_layer_reads_is_refused() -> None:
    tensors = golden(HYBRID)
    with pytest.raises(
        ConfigError, match="--set mamba3_mimo_rank=…: this model, of the family oxidizr, does"
    ):
        resolve(HYBRID_CONFIG, tensors, overrides=("mamba3_mimo_rank=2",))
    assert resolve(HYBRID_CONFIG, tensors, overrides=("mamba2_chunk_size=64", "rms_norm_eps=0.125"))
    with pytest.raises(ConfigError, match="is not JSON"):
        resolve(None, tensors, overrides=("layer_types=Mamba2",))
    with pytest.raises(ConfigError, match="max_seq_len is -1; it must be a whole number"):
        resolve(None, tensors, overrides=("max_seq_len=-1",))


# ---- what does not fit


@pytest.mark.parametrize(
    ("config", "needles"),
    [
        ({"mamba2_num_heads": 8}, ["mamba2_num_heads = 8", "layers.0.mamba2.mixer.A_log [4]", "means 4"]),
        ({"mamba_layers": [0, 1]}, ["mamba_layers = [0, 1]", "layers.1.self_attn.w_dkv.weight", "[0]"]),
        ({"kv_latent_dim": 6}, ["kv_latent_dim = 6", "w_dkv.weight [4, 8]"]),
        ({"num_layers": 4}, ["num_layers = 4", "means 2"]),
        ({"vocab_size": 12}, ["vocab_size = 12", "embed_tokens.weight [11, 8]", "--set vocab_size=11"]),
        ({"mamba3_enabled": True}, ["mamba3_enabled = True", "mamba2 layers"]),
        ({"mamba2_state_size": 2}, ["mamba2_state_size = 2", "= 3 with 4 heads"]),
        ({"experts_per_tok": 5}, ["experts_per_tok = 5", "only 3 experts"]),
        ({"sliding_window": 16}, ["sliding_window"]),
    ],
)
def test_a_config_against_the_tensors_names_both(config: dict[str, Any], needles: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        resolve(config, golden(HYBRID))
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize("name", [n for n in HYBRID if n != "lm_head.weight"])
def test_any_missing_tensor_is_named(name: str) -> None:
    tensors = golden(HYBRID)
    del tensors[name]
    with pytest.raises(PlaitError) as caught:
        resolve(HYBRID_CONFIG, tensors)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", HYBRID)
def test_any_odd_shape_is_named(name: str) -> None:
    tensors = golden(HYBRID)
    shape = tensors[name].shape
    tensors[name] = torch.zeros(*shape[:-1], shape[-1] + 1)
    with pytest.raises(PlaitError) as caught:
        resolve(HYBRID_CONFIG, tensors)
    assert isinstance(caught.value, ShapeMismatch | UnsupportedModel)
    assert name in str(caught.value)


def test_all_misfits_are_reported_at_once() -> None:
    tensors = golden(HYBRID)
    del tensors["layers.1.self_attn.o_proj.weight"]
    tensors["layers.0.mamba2.mixer.D"] = torch.zeros(5)
    tensors["layers.0.mamba2.mixer.extra"] = torch.zeros(1)
    with pytest.raises(PlaitError) as caught:
        resolve({**HYBRID_CONFIG, "d_rope": 8}, tensors)
    for needle in ("o_proj", "mixer.D has shape [5]", "mixer.extra", "d_rope = 8", "4 places"):
        assert needle in str(caught.value)
    assert isinstance(caught.value.__cause__, type(None))


def test_a_missing_expert_of_a_later_layer_has_its_own_name() -> None:
    shapes = {**ends(8, 11)}
    for i in range(2):
        shapes |= {**norms(i, 8), **mla(i, 8, 2, 4, 6, 4), **moe(i, 8, 4, 10)}
    tensors = prefixed(golden(shapes))
    del tensors["model.layers.1.moe.experts.2.up_proj.weight"]
    with pytest.raises(
        MissingTensor, match=r"'model\.layers\.1\.moe\.experts\.2\.up_proj\.weight' \[10, 8\]"
    ):
        resolve(None, tensors)


def test_gaps_and_strangers() -> None:
    tensors = {n.replace("layers.1.", "layers.3."): t for n, t in golden(HYBRID).items()}
    with pytest.raises(MissingTensor, match=r"layer\(s\) 1, 2"):
        resolve(None, tensors)
    with pytest.raises(UnusedTensor, match="visual"):
        resolve(None, {**golden(HYBRID), "visual.patch.weight": torch.zeros(1)})
    with pytest.raises(UnsupportedModel, match="layer 0 has no known mixer"):
        resolve(None, {"layers.0.rwkv.w": torch.zeros(1)})
    both = golden({**ends(8, 11), **mamba2_layer(0, 8, 4, 4, 3), **gqa(0, 8, 4)})
    with pytest.raises(UnsupportedModel, match="mamba2 and gqa at once"):
        resolve(None, both)


def test_heads_of_plain_attention_must_be_given() -> None:
    """Rows of q and k fit several widths: an assumption could give another model."""
    tensors = golden({**ends(64, 11), **norms(0, 64), **gqa(0, 64, 32), **swiglu("layers.0.mlp", 64, 16)})
    with pytest.raises(ConfigError, match=r"fit several: .*--set num_attention_heads"):
        resolve(None, tensors)
    for told in ({"num_attention_heads": 4}, {"head_dim": 16}, {"kv_heads": 2}):
        mixer = resolve(told, tensors).spec.layers[0][0].mixer
        assert isinstance(mixer, AttentionSpec)
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (4, 2, 16)
    with pytest.raises(UnsupportedModel, match="num_attention_heads = 3, which does not fit"):
        resolve({"num_attention_heads": 3}, tensors)


def test_the_exact_mode_wants_its_chunk_size() -> None:
    with pytest.raises(ConfigError, match="mamba2_chunk_size"):
        resolve(None, golden(HYBRID), ssm_mode="exact")
    dense = resolve({"num_attention_heads": 4}, golden(DENSE), ssm_mode="exact")
    assert dense.spec.causal


# ---- which family a file is of


LLAMA = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
MAMBA = ["backbone.embeddings.weight", "backbone.layers.0.mixer.A_log", "backbone.norm_f.weight"]
BAMBA = ["model.layers.0.mamba.A_log", "model.layers.0.input_layernorm.weight"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, LLAMA),
        ({"model_type": "llama", "num_hidden_layers": 2}, LLAMA),
        (None, LLAMA),
        ({"architectures": ["LlamaModel"]}, [n.removeprefix("model.") for n in LLAMA]),
        ({"architectures": ["Mamba2ForCausalLM"]}, MAMBA),
        (None, MAMBA),
        ({"ssm_cfg": {}, "d_model": 8, "n_layer": 1}, ["backbone.embedding.weight", *MAMBA[1:]]),
        ({"architectures": ["BambaForCausalLM"]}, BAMBA),
        (None, BAMBA),
        (None, ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.0.mlp.gate.weight"]),
        (None, ["model.layers.0.block_sparse_moe.experts.0.w1.weight"]),
        (None, []),
    ],
)
def test_files_of_other_families_are_left_to_them(config: Any, names: list[str]) -> None:
    assert not is_oxidizr(config, names)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (None, list(HYBRID)),
        (None, list(DENSE)),
        ({"hidden_size": 8, "num_layers": 2}, [f"model.{n}" for n in DENSE]),
        ({"architectures": ["Whatever"], "model_type": "mamba2"}, list(HYBRID)),
        ({"model_type": "mamba2", "ssm": {"num_heads": 4}}, ["model.layers.0.mixer.A_log"]),
        (None, ["layers.0.mamba.a_log"]),
    ],
)
def test_its_own_files_are_known(config: Any, names: list[str]) -> None:
    assert is_oxidizr(config, names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hidden_size", "it is written key=value"),
        ("hiden_size=3", "not a key of this format; near keys that are read: hidden_size"),
    ],
)
def test_an_override_that_is_none_says_what_is_wrong(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_override(given)
