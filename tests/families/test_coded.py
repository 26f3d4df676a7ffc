"""Families that came with code of their own: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec
from tests.families.coded_oracles import BAICHUAN, CHATGLM, CODED, SOLAR, TELECHAT
from tests.families.older_oracles import IDS
from tests.families.parity import Memory, check_description, decoder, resolved, whole, worst

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CODED},
    "chatglm of few key heads": (
        "chatglm_plain",
        {"multi_query_attention": True, "multi_query_group_num": 2, "add_bias_linear": False},
    ),
    "chatglm 3 with a base": ("chatglm_plain", {"rope_ratio": 50.0, "rmsnorm": True, "add_qkv_bias": True}),
    "chatglm 2 with places between": (
        "chatglm_plain",
        {"rope_ratio": 16, "by_place": True, "_name_or_path": "THUDM/chatglm2-6b-32k"},
    ),
    "baichuan 7b": ("baichuan2", {"architectures": ["BaiChuanForCausalLM"]}),
    "telechat with a norm of embeddings": ("telechat", {"embed_layernorm": True, "base_seqlen": 200}),
    "telechat 7b": ("telechat", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    "teleflm without scales": ("teleflm", {"use_mup": False}),
}
NAMES = {  # of llama.cpp's converter
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_the_description(name: str) -> None:
    which, changes = CHANGES[name]
    family = CODED[which]
    config = {**family.config, **changes}
    tensors = family.checkpoint(config)
    check_description(config, tensors, [family.logits(config, tensors, ids) for ids in IDS], IDS)


def test_a_baichuan_of_40_layers_in_gguf_is_the_13b() -> None:
    config = {key: value for key, value in BAICHUAN.items() if key != "z_loss_weight"}
    config["num_hidden_layers"] = 40
    tensors = {name: w.float() for name, w in CODED["baichuan2"].checkpoint(config).items()}
    wanted = CODED["baichuan2"].logits(config, {k: w.double() for k, w in tensors.items()}, IDS[0])
    ends = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
    stored = {f"{name}.weight": tensors[f"{theirs}.weight"] for name, theirs in ends.items()}
    for i in range(40):
        at = f"model.layers.{i}"
        for theirs, name in NAMES.items():
            stored[f"blk.{i}.{name}.weight"] = tensors[f"{at}.{theirs}.weight"]
        for x, w in zip("qkv", tensors[f"{at}.self_attn.W_pack.weight"].chunk(3), strict=True):
            if x != "v":  # as llama.cpp's converter orders rows, whatever positions there are
                w = w.unflatten(0, (6, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
            stored[f"blk.{i}.attn_{x}.weight"] = w
    keys: dict[str, Any] = {
        "block_count": 40,
        "context_length": 128,
        "embedding_length": 36,
        "feed_forward_length": 44,
        "attention.head_count": 6,
        "attention.head_count_kv": 6,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 6,
        "vocab_size": 97,
    }
    metadata = {"general.architecture": "baichuan", **{f"baichuan.{k}": v for k, v in keys.items()}}
    memory = Memory(stored)
    model = decoder(resolved(memory, gguf=metadata), memory)
    assert worst(whole(model, IDS[0]).double(), wanted) <= 1e-4 * float(wanted.abs().max())


def slopes_of(config: dict[str, Any]) -> set[bool]:
    return {m.slopes is not None for m in build_spec(config)[0].mixers_of(AttentionSpec)}


def test_width_and_spelling_tell_a_baichuan_with_positions() -> None:
    assert slopes_of(BAICHUAN) == {True}
    assert slopes_of({**BAICHUAN, "hidden_size": 4096}) == {False}
    assert slopes_of({**BAICHUAN, "architectures": ["BaiChuanForCausalLM"]}) == {False}
    assert slopes_of({**BAICHUAN, "alibi": False}) == {False}


def test_the_head_of_a_second_baichuan_is_not_tied() -> None:
    first = {key: value for key, value in BAICHUAN.items() if key != "z_loss_weight"}
    assert build_spec({**first, "tie_word_embeddings": True})[0].tied
    for second in ({"z_loss_weight": 0}, {"vocab_size": 125_696}):
        with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings = True .* for Baichuan 2"):
            build_spec({**first, **second, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_encoding_2d": True}, "ChatGLM 1 is not implemented"),
        ({"inner_hidden_size": 64}, "ChatGLM 1 is not implemented"),
        ({"pre_seq_len": 128}, "pre_seq_len = 128 is not implemented for ChatGLM"),
        ({"quantization_bit": 4}, "quantization_bit = 4 is not implemented for ChatGLM"),
        ({"original_rope": False}, "original_rope = False is not implemented for ChatGLM"),
        ({"post_layer_norm": False}, "post_layer_norm = False is not implemented for ChatGLM"),
        ({"rope_ratio": 0}, "rope_ratio is 0"),
        (
            {"rope_ratio": 50, "padded_vocab_size": 65_024, "_name_or_path": "./tuned"},
            "ChatGLM 2 and multiplies their base in ChatGLM 3, and _name_or_path names neither",
        ),
    ],
)
def test_chatglm_refuses_what_no_such_model_has(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**CHATGLM, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 16}, "num_experts = 16 is not implemented for TeleChat"),
        ({"semi_causal": True}, "semi_causal = True is not implemented for TeleChat"),
        ({"training_seqlen": 0}, "training_seqlen is 0"),
    ],
)
def test_telechat_refuses_what_no_such_model_has(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**TELECHAT, **changes})


def test_the_code_of_the_first_telechats_says_for_which_length_positions_are() -> None:
    plain = {key: value for key, value in TELECHAT.items() if key != "base_seqlen"}
    published = {**plain, "training_seqlen": 8192}
    dim = 36 // 6
    bases = {160_256: 1e4 * 3 ** (dim / (dim - 2)), 120_000: 1e4}
    for vocabulary, base in bases.items():
        spec = build_spec({**published, "vocab_size": vocabulary})[0]
        found = {m.rope.theta for m in spec.mixers_of(AttentionSpec) if m.rope}
        assert [*found] == [pytest.approx(base)]
        assert spec.max_len == 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bskcn_1": [5]}, "layer 3 of bskcn_3 reads what no layer before it keeps"),
        ({"bskcn_2": 4}, "must be lists of layers"),
        ({"bskcn_tv": [0.8]}, "must be lists of layers"),
    ],
)
def test_connections_of_solar_that_lead_nowhere_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**SOLAR, **changes})


def test_glm_4v_is_its_text_model_next_to_what_sees() -> None:
    stored = Memory({name: w.float() for name, w in CODED["chatglm_plain"].checkpoint().items()})
    want = whole(decoder(resolved(stored, CHATGLM), stored), IDS[0])
    sees = Memory({**stored, "transformer.vision.linear_proj.gate_proj.weight": want})
    config = {**CHATGLM, "vision_config": {"hidden_size": 8, "num_hidden_layers": 2}}
    assert worst(whole(decoder(resolved(sees, config), sees), IDS[0]), want) == 0
