"""Hybrids that transformers lacks: the logits of a plain description of each, and what is refused."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.checkpoint.weights import Target, Weights
from plait.cli.common.format_model import branch_text
from plait.convert.hf.target import hf_target
from plait.convert.plan.source import Model
from plait.errors import PlaitError, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.divide import divide_model
from plait.model.mtp import MtpHead
from plait.partition import Rank
from plait.spec.branches import DepthSpec, GatedNormSpec
from plait.spec.model import MlaSpec, MlpSpec, MoeSpec, NormSpec
from plait.spec.recurrent import DeltaNetSpec
from tests.checkpoint.readers.damage import bounded, hostile
from tests.convert.test_round_trips import written
from tests.families.hybrid_oracles import ALICE, GIGACHAT, HYBRIDS, giga_draft, giga_hidden
from tests.families.older_oracles import IDS
from tests.families.parity import CPU, LONGEST, Memory, check_description, decoder, resolved, whole, worst
from tests.families.test_mtp import HeadSession

FUZZED = 30
FACTORS = ("layernorm_gating_weight", "linear_sigmoid_gate_scale")
NO_FACTORS = (1e300, 1e-300, 1e-44, math.inf, math.nan, -1.0, True, "2", None)
PLAIN = {"use_mla_scaling_factor": False, "gated_attention": False, "num_nextn_predict_layers": 0}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in HYBRIDS},
    "alice without a shared expert": ("alice_ai", {"shared_expert_intermediate_size": 0}),
    "alice in blocks of one layer": ("alice_ai", {"block_attn_res_block_size": 1}),
    "gigachat of halves that turn": ("gigachat", {"rope_interleave": False, "swiglu_limit": None}),
    "gigachat without a rank of queries": ("gigachat", {"q_lora_rank": None, "swiglu_limit": 10.0}),
    **{
        f"gigachat with norms {places}": (
            "gigachat",
            {"layernorm_type": places, "output_gate_type": "silu", "linear_gating_type": ""},
        )
        for places in ("pre", "post")
    },
    **{
        f"gigachat with {kind}": ("gigachat", {"norm_type": kind, "use_mla_scaling_factor": scaled})
        for kind, scaled in (("GatedNorm", True), ("ZeroCenteredRMSNorm", False), ("LlamaRMSNorm", False))
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_the_description(name: str) -> None:
    which, changes = CHANGES[name]
    family, config = HYBRIDS[which], {**HYBRIDS[which].config, **changes}
    tensors = family.checkpoint(config)
    check_description(config, tensors, [family.logits(config, tensors, ids) for ids in IDS], IDS)


@pytest.mark.parametrize("change", [{}, {"nextn_is_sparse": True}, {"layernorm_type": "pre"}])
def test_head_of_gigachat_drafts_as_its_description_does(change: dict[str, Any]) -> None:
    """Two tokens, the second from what the head's norm read for the first, as in SGLang."""
    config = {**GIGACHAT, **change}
    tensors = HYBRIDS["gigachat"].checkpoint(config)
    memory = Memory({name: w.float() for name, w in tensors.items()})
    found = resolved(memory, config)
    weights = Weights(memory, found.names, Target(CPU, torch.float32, LONGEST, found.spec.hidden_size))
    session = HeadSession(MtpHead(found.spec, weights, decoder(found, memory)))
    ids, hidden = IDS[0][1:], giga_hidden(config, tensors, IDS[0])[:-1]
    start, before = 0, hidden.float()
    for _ in range(2):
        wanted, scores = giga_draft(config, tensors, ids, hidden)
        made, logits = session.step(start, ids[start:], before)
        assert worst(made.double(), wanted[start:]) <= 1e-4
        assert worst(logits.double(), scores[start:]) <= 1e-4
        start, before = len(ids), made[-1:]
        ids = torch.cat([ids, scores[-1:].argmax(-1)])
        hidden = torch.cat([hidden, wanted[-1:]])


def test_gigachat_has_norms_and_gates_where_its_config_says() -> None:
    spec, _ = build_spec(GIGACHAT)
    gated = GatedNormSpec(1e-5, rank=16, scale=1.6)
    assert {(b.norm, b.post_norm) for _, b in spec.branches()} == {(gated, gated)}
    assert spec.norm == gated
    assert spec.mtp is not None
    assert spec.mtp.norm == gated
    delta, attn, dense, sparse = (spec.layers[i][j].mixer for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)))
    assert isinstance(delta, DeltaNetSpec)
    assert isinstance(attn, MlaSpec)
    assert (delta.gate, attn.out_gate) == ("sigmoid", True)
    assert attn.latent_norm == replace(gated, scale=1.6 * 1.5)  # the root of 36 / 16
    assert attn.scale == pytest.approx(12**-0.5 * (36 / 20) ** 0.5 / 1.5)
    assert dense == MlpSpec(44, "swiglu_cut_7")
    assert isinstance(sparse, MoeSpec)
    assert (sparse.expert, sparse.shared) == (MlpSpec(20, "swiglu_cut_7"), MlpSpec(40, "swiglu_cut_7"))
    assert branch_text(spec.layers[1][0]).endswith("gated · post-norm · norms with gates")
    plain, _ = build_spec({**GIGACHAT, "norm_type": "LlamaRMSNorm", "layernorm_type": "pre"} | PLAIN)
    assert {(b.norm, b.post_norm) for _, b in plain.branches()} == {(NormSpec(1e-5), None)}
    listed = {k: v for k, v in GIGACHAT.items() if k != "layer_types"}
    assert build_spec({**listed, "full_attention_layers": [1, 3]})[0] == spec


def test_names_that_sglang_gives_to_gates_are_read_alike() -> None:
    tensors = {name: w.float() for name, w in HYBRIDS["gigachat"].checkpoint().items()}
    words = {"gate_up_projection": "gate_up_lowrank", "gate_down_projection": "gate_down_lowrank"}
    words["self_attn.gate_proj"] = "self_attn.attn_gate"
    other = Memory(tensors)
    for old, new in words.items():
        other = Memory({name.replace(old, new): w for name, w in other.items()})
    assert other.keys() != tensors.keys()
    got, want = (whole(decoder(resolved(m, GIGACHAT), m), IDS[0]) for m in (other, Memory(tensors)))
    assert worst(got, want) == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_is_written_with_the_names_of_its_files(name: str) -> None:
    config = {**HYBRIDS[name].config, "num_nextn_predict_layers": 0}
    memory = Memory({key: w.float() for key, w in HYBRIDS[name].checkpoint(config).items()})
    model = Model(resolved(memory, config), memory)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    assert {*file} == {*memory}
    assert [key for key, w in file.items() if w.shape != memory[key].shape] == []
    got, want = (
        whole(decoder(r, m), IDS[0])
        for r, m in ((resolved(file, target.config), file), (model.resolved, memory))
    )
    assert worst(got, want) <= 1e-5


def test_unused_tensors_of_norms_and_of_drafts_are_left_aside() -> None:
    """Norms before branches of a model that has them behind alone, and several heads."""
    config = {**GIGACHAT, "layernorm_type": "post", "num_nextn_predict_layers": 2}
    every = HYBRIDS["gigachat"].checkpoint({**GIGACHAT, "num_nextn_predict_layers": 2})
    memory = Memory({name: w.float() for name, w in every.items()})
    assert whole(decoder(resolved(memory, config), memory), IDS[0]).isfinite().all()
    drafts = {"mtp.layers.0.mlp.gate.weight": torch.zeros(6, 36)}
    alice = Memory({name: w.float() for name, w in HYBRIDS["alice_ai"].checkpoint().items()} | drafts)
    assert whole(decoder(resolved(alice, ALICE), alice), IDS[0]).isfinite().all()


def test_alice_ai_reads_means_over_blocks_of_layers() -> None:
    spec, _ = build_spec(ALICE)
    depths = [branch.mixer for layer in spec.layers for branch in layer]
    assert all(isinstance(mixer, DepthSpec) for mixer in depths)
    assert [len(layer) for layer in spec.layers] == [2, 2, 2, 2, 3]
    assert [layer[0].mixer.sources for layer in spec.layers] == [0, 1, 1, 2, 2]  # type: ignore[attr-defined]
    assert [layer[0].keep for layer in spec.layers] == [0.0, None, 0.0, None, 0.0]


@pytest.mark.parametrize(
    ("config", "change", "why"),
    [
        (ALICE, {"block_attn_res_block_size": 0}, "blocks of 0 layers"),
        (ALICE, {"block_attn_res_block_size": None}, "--set block_attn_res_block_size=VALUE"),
        (ALICE, {"kda_allow_negative_eigenvalues": True}, "kda_allow_negative_eigenvalues = True"),
        (ALICE, {"router_score_function": "softmax"}, "router_score_function = 'softmax'"),
        (ALICE, {"router_bias_correction": False}, "router_bias_correction = False"),
        (ALICE, {"attn_output_gate": False}, "attn_output_gate = False"),
        (ALICE, {"linear_num_value_heads": 6}, "3 and 6 as linear_num_key_heads and linear_num_value_heads"),
        (ALICE, {"mlp_only_layers": [1]}, "layers without experts"),
        (ALICE, {"layer_types": ["conv"] * 5}, "layer_types of Alice AI has 'conv'"),
        (ALICE, {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        (GIGACHAT, {"norm_type": "LayerNorm"}, "norm_type = 'LayerNorm'"),
        (GIGACHAT, {"norm_type": "ZeroCenteredRMSNorm"}, "--set use_mla_scaling_factor=false"),
        (GIGACHAT, {"layernorm_type": "none"}, "layernorm_type = 'none'"),
        (
            GIGACHAT,
            {"layernorm_gating_weight": 0},
            "layernorm_gating_weight is '0', not a number from 1e-06 to 1e.06",
        ),
        (
            GIGACHAT,
            {"swiglu_limit": 8.0},
            "swiglu_limit 8 is not .* for GigaChat 3.5; known: 7 and 10",
        ),
        (GIGACHAT, {"use_shared_expert_sigmoid": True}, "use_shared_expert_sigmoid = True"),
        (GIGACHAT, {"linear_attention_type": "Mamba2"}, "linear_attention_type = 'Mamba2'"),
        (GIGACHAT, {"output_gate_type": "tanh"}, "output_gate_type = 'tanh'"),
        (GIGACHAT, {"layer_types": None}, "GigaChat 3.5 wants layer_types, or full_attention_layers"),
        (GIGACHAT, {"layer_types": None, "full_attention_layers": [4]}, "a list of numbers below 4"),
        (GIGACHAT, {"layer_types": ["conv"] * 4}, "layer_types of GigaChat 3.5 has 'conv'"),
        (ALICE, {"block_attn_res_block_size": True}, "blocks of True layers"),
        (ALICE, {"block_attn_res_block_size": 2.0}, r"blocks of 2\.0 layers"),
        (ALICE, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (ALICE, {"norm_topk_prob": "false"}, "norm_topk_prob is 'false', not true or false"),
        (GIGACHAT, {"layernorm_type": None}, "does not say 'layernorm_type'"),
        (GIGACHAT, {"norm_type": None}, "does not say 'norm_type'"),
        (GIGACHAT, {"gated_attention": "false"}, "gated_attention is 'false', not true or false"),
        (GIGACHAT, {"nextn_is_sparse": "no"}, "nextn_is_sparse is 'no', not true or false"),
        (GIGACHAT, {"swiglu_limit": "7"}, "swiglu_limit is '7', not a number"),
        (GIGACHAT, {"swiglu_limit": math.nan}, "swiglu_limit is 'nan', not a number"),
        *(
            (GIGACHAT, {key: n}, re.escape(f"{key} is '{n}', not a number"))
            for key in FACTORS
            for n in NO_FACTORS
        ),
        *(
            (GIGACHAT, {"layer_types": None, "full_attention_layers": those}, "a list of numbers below 4")
            for those in ([True, 3], [[1]], [1.0], "13", [-1])
        ),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**config, **change})


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        ("alice_ai", {"block_attn_res_block_size": None}, "2"),
        ("alice_ai", {"kda_allow_negative_eigenvalues": None}, "false"),
        ("alice_ai", {"router_score_function": None}, '"sigmoid"'),
        ("alice_ai", {"router_bias_correction": None}, "true"),
        ("gigachat", {"norm_type": "ZeroCenteredRMSNorm"}, "false"),
        ("gigachat", {"layernorm_gating_weight": "1.6"}, "1.6"),
        ("gigachat", {"layer_types": None}, "[1, 3]"),
    ],
)
def test_advice_of_an_error_can_be_followed(name: str, change: dict[str, Any], value: str) -> None:
    """Of a key that the file has with a wrong value, and of one that it lacks."""
    config = {**HYBRIDS[name].config, **change}
    memory = Memory({key: w.float() for key, w in HYBRIDS[name].checkpoint().items()})
    lacking = {key: one for key, one in config.items() if one is not None}
    for said in (config, lacking):
        with pytest.raises(UnsupportedModel, match="--set ") as told:
            resolved(memory, said)
        found = re.search(r"--set (\w+)=", str(told.value))
        assert found
        assert resolved(memory, said, (f"{found[1]}={value}",)).spec.layers


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("gigachat", "use_shared_expert_sigmoid=false"),
        ("gigachat", 'linear_attention_type="Qwen3NextGatedDeltaNet"'),
        ("gigachat", "swiglu_limit=7"),
        ("gigachat", 'layernorm_type="pre_post"'),
        ("alice_ai", 'scoring_func="sigmoid"'),
    ],
)
def test_keys_of_which_an_error_names_the_known_values_can_be_set(name: str, override: str) -> None:
    key = override.partition("=")[0]
    said = {k: value for k, value in HYBRIDS[name].config.items() if k != key}
    memory = Memory({k: w.float() for k, w in HYBRIDS[name].checkpoint().items()})
    assert resolved(memory, said, (override,)).spec.layers
    with pytest.raises(UnsupportedModel, match=f"{key}[ =]"):
        resolved(memory, said, (f'{key}="other"',))


@pytest.mark.parametrize("name", HYBRIDS)
def test_hostile_configs_are_refused_or_answered(name: str) -> None:
    family, rng = HYBRIDS[name], random.Random(5)
    memory = Memory({key: w.float() for key, w in family.checkpoint().items()})
    for _ in range(FUZZED):
        said = hostile(family.config, rng)
        try:
            with bounded():
                whole(decoder(resolved(memory, said), memory), IDS[0][:5])
        except PlaitError:
            pass


def test_ranks_divide_heads_and_keep_the_gates_of_norms_whole() -> None:
    half = Rank(index=0, size=2, shares=2)
    config = {**GIGACHAT, "num_attention_heads": 4, "moe_intermediate_size": 32}
    spec, cuts = divide_model(build_spec(config)[0], half)
    delta, attn = (spec.layers[i][0].mixer for i in (0, 1))
    assert isinstance(delta, DeltaNetSpec)
    assert isinstance(attn, MlaSpec)
    assert (delta.num_heads, delta.num_key_heads, attn.num_heads) == (2, 1, 2)
    assert cuts["layers.1.attn.out_gate"].rows == ((0, 12),)
    assert not [name for name in cuts if name.endswith(("narrow", "widen"))]
