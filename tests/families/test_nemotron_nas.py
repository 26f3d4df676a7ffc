"""Nemotron NAS: Llama of which some layers have no attention, or no feed-forward; an oracle written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from plait.errors import UnsupportedModel
from plait.spec.model import AttentionSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

HEADS, HIDDEN = 4, 32
GROUPS, MULTS = (2, None, 4, None, 1), (3.0, 3.0, None, None, 6.0)


def block(group: int | None, mult: float | None) -> dict[str, Any]:
    attn = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}
    return {"attention": attn, "ffn": {"ffn_mult": mult, "no_op": mult is None, "replace_with_linear": False}}


CONFIG: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": None,
    "num_hidden_layers": len(GROUPS),
    "intermediate_size": None,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "block_configs": [block(*pair) for pair in zip(GROUPS, MULTS, strict=True)],
}


def write_checkpoint() -> tuple[dict[str, Tensor], LlamaForCausalLM]:
    """Tensors of the searched model, and Llama with zeros where it has none."""
    config = LlamaConfig(
        **{
            key: CONFIG[key]
            for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
        },
        num_key_value_heads=HEADS,
        intermediate_size=256,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={**CONFIG["rope_scaling"], "rope_theta": 5e5},
    )
    oracle = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tiny.randomize(oracle, one_plus=False)
    state = oracle.state_dict()
    found = dict(state)
    for i, (group, mult) in enumerate(zip(GROUPS, MULTS, strict=True)):
        attn, ffn = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        if group is None:
            state[f"{attn}o_proj.weight"].zero_()
            gone = (attn, f"model.layers.{i}.input_layernorm")
        elif group > 1:
            gone = ()
            for x in "kv":  # heads of a group are alike
                name = f"{attn}{x}_proj.weight"
                few = state[name].view(HEADS // group, group, 8, HIDDEN)[:, 0]
                state[name].copy_(few.repeat_interleave(group, 0).view(HIDDEN, HIDDEN))
                found[name] = few.flatten(0, 1).clone()
        if mult is None:
            state[f"{ffn}down_proj.weight"].zero_()
            gone = (*(gone if group is None else ()), ffn, f"model.layers.{i}.post_attention_layernorm")
        if group is None or mult is None:
            found = {name: w for name, w in found.items() if not name.startswith(gone)}
    return {name: w.clone() for name, w in found.items()}, oracle


def test_layers_that_lack_a_part_pass_on_what_they_read(tmp_path: Path) -> None:
    tensors, oracle = write_checkpoint()
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, json.loads(json.dumps(CONFIG)))
    assert [len(layer) for layer in found.spec.layers] == [2, 1, 1, 0, 2]
    assert [mixer.num_kv_heads for mixer in found.spec.mixers_of(AttentionSpec)] == [2, 1, 4]
    model = decoder(found, checkpoint)
    ids = [torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(4)) for length in (23, 17)]
    with torch.no_grad():
        wanted = [oracle(x[None]).logits[0] for x in ids]
    assert worst(whole(model, ids[0]), wanted[0]) <= 1e-4
    for logits, want in zip(in_pieces(model, ids), wanted, strict=True):
        assert worst(logits, want) <= 1e-4


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("attention", "replace_with_linear", True, "layer 1 has a linear layer in place of attention"),
        ("ffn", "replace_with_linear", True, "layer 1 has a linear layer in place of ffn"),
        ("attention", "window_length", 64, "window_length = 64 of layer 1 is not implemented"),
    ],
)
def test_what_a_block_may_have_else_is_refused(part: str, key: str, value: object, said: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    config["block_configs"][1][part][key] = value
    with pytest.raises(UnsupportedModel, match=said):
        resolved(Memory(), config)
    with pytest.raises(UnsupportedModel, match="describes 5 of 4 layers"):
        resolved(Memory(), {**CONFIG, "num_hidden_layers": 4})


def test_a_gguf_file_lists_heads_and_widths_of_each_layer() -> None:
    tensors, oracle = write_checkpoint()
    keys = {
        "block_count": 5,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "attention.head_count": [4, 0, 4, 0, 4],
        "attention.head_count_kv": [2, 0, 1, 0, 4],
        "feed_forward_length": [256, 256, 0, 0, 256],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.freq_base": 5e5,
        "rope.dimension_count": 8,
    }
    metadata = {"general.architecture": "deci", **{f"deci.{key}": value for key, value in keys.items()}}
    words = {
        "embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    words |= {"self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "_proj": ""}
    words |= {"self_attn.": "attn_", "mlp.": "ffn_", "input_layernorm": "attn_norm", "model.": ""}
    stored = {}
    for name, w in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            w = w.unflatten(0, (len(w) // 8, 2, 4)).transpose(1, 2).flatten(0, 2)
        for theirs, ours in words.items():
            name = name.replace(theirs, ours)
        stored[name] = w
    plain = oracle.model.rotary_emb
    stored["rope_freqs.weight"] = 5e5 ** (-torch.arange(0, 8, 2) / 8) / plain.inv_freq
    file = Memory(stored)
    ids = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = oracle(ids[None]).logits[0]
    assert worst(whole(decoder(resolved(file, gguf=metadata), file), ids), wanted) <= 1e-4
    for key, value in (("attention.head_count", [4, 0]), ("attention.head_count", [4, 0, 2, 0, 4])):
        with pytest.raises(UnsupportedModel, match=r"numbers each|layer 2 has 2 heads"):
            resolved(file, gguf={**metadata, f"deci.{key}": value})
