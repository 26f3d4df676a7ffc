"""What names and shapes leave open, and in which order it is tried."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ConfigError, UnsupportedModel
from plait.families.common.resolved import Resolved
from plait.families.resolve import resolve
from plait.loading.probe.candidates import Quantity, is_open, quantities
from plait.quant.weight import as_tensor
from tests.families import tiny, tiny_bare
from tests.families.parity import Memory, resolved


def llama(vocab: int = 49152, hidden: int = 576, kv: int = 192) -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}self_attn.k_proj.weight": (kv, hidden),
        f"{layer}self_attn.v_proj.weight": (kv, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        **{f"{layer}mlp.{x}_proj.weight": (64, hidden) for x in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (hidden, 64),
    }


def understood(*overrides: str, config: dict[str, Any] | None = None) -> Resolved:
    def unread(name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is read, and nobody may look at numbers")

    return resolve(config, llama(), read=unread, overrides=overrides)


def by_name(found: Resolved) -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in quantities(found)}


def test_what_matters_most_is_tried_first() -> None:
    names = list(by_name(understood()))
    assert names == [
        *("norm_offset", "head_dim", "rope_interleave", "architectures"),
        *("hidden_act", "rope_theta"),
    ]
    reads_a_share = by_name(understood('architectures=["Phi3ForCausalLM"]'))
    assert "partial_rotary_factor" in reads_a_share


def test_what_is_likeliest_is_tried_first_and_every_head_size_divides() -> None:
    open_now = by_name(understood())
    sizes = [option["head_dim"] for option in open_now["head_dim"].options]
    assert sizes[0] == 64
    assert set(sizes) == {64, 96, 192, 32, 16, 8}
    assert open_now["rope_theta"].options[0] == {"rope_theta": 1e5}
    assert open_now["rope_theta"].is_long
    assert not open_now["head_dim"].is_long


def test_what_a_user_says_is_not_tried() -> None:
    names = by_name(understood("head_dim=96", "rope_theta=10000.0", 'architectures=["LlamaForCausalLM"]'))
    assert not {"head_dim", "rope_theta", "architectures"} & names.keys()
    assert "rope_interleave" in names


def test_the_number_of_heads_says_how_wide_they_are() -> None:
    assert "head_dim" not in by_name(understood("num_attention_heads=9"))


def test_a_config_that_says_how_positions_turn_leaves_nothing_open_there() -> None:
    names = by_name(understood(config={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}))
    assert not {"rope_theta", "partial_rotary_factor", "rope_scaling"} & names.keys()
    assert "head_dim" in names


def test_a_whole_config_leaves_nothing_open() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 64,
    }
    found = understood(config=config)
    assert not found.is_detected
    assert quantities(found) == []


def test_a_head_size_that_a_norm_shows_is_not_open() -> None:
    shapes = llama() | {f"model.layers.0.self_attn.{x}_norm.weight": (64,) for x in "qk"}
    found = resolve(None, shapes, read=lambda name: torch.empty(0))
    assert found.family == "qwen3"
    assert "head_dim" not in by_name(found)


def test_granite_is_tried_with_what_it_cannot_be_without() -> None:
    others = by_name(understood())["architectures"].options[1:]
    (granite,) = [o for o in others if o["architectures"] == ["GraniteForCausalLM"]]
    found = understood(*(f"{key}={value}".replace("'", '"') for key, value in granite.items()))
    assert found.family == "granite"
    assert granite["attention_multiplier"] == 1 / 64
    assert found.spec.embed_scale == 12.0


def test_a_model_that_is_no_granite_after_all_loses_its_multipliers() -> None:
    as_granite = understood('architectures=["GraniteForCausalLM"]', "embedding_multiplier=12.0")
    known = dict.fromkeys(("architectures", "embedding_multiplier"), "probed")
    again = Resolved(
        as_granite.spec,
        as_granite.names,
        as_granite.config,
        {**as_granite.provenance, **known},
        "granite",
        True,
    )
    (llama_again, *_) = [
        option
        for option in by_name(again)["architectures"].options
        if option["architectures"] == ["LlamaForCausalLM"]
    ]
    assert llama_again["embedding_multiplier"] is None


def test_only_what_may_be_is_open() -> None:
    found = understood("rope_theta=5.0")
    assert is_open(found, "head_dim")
    assert is_open(found, "architectures")
    assert is_open(found, "nobody_knows_it")
    assert not is_open(found, "rope_theta")
    assert not is_open(found, "hidden_size")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", tiny_bare.VARIANTS)
def test_every_option_is_a_model_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """No option may be one that `--set` does not know, because a key without a reader changes nothing."""
    tiny.write(name, tmp_path, tiny_bare.VARIANTS[name])
    _, tensors, _ = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    for quantity in quantities(resolved(checkpoint)):
        said = tuple(f"{key}={dumps(value)}" for key, value in quantity.options[0].items())
        assert resolved(checkpoint, None, said).spec == resolved(checkpoint).spec, quantity.name
        changed = []
        for option in quantity.options[1:]:
            said = tuple(f"{key}={dumps(value)}" for key, value in option.items())
            other = model_or_none(checkpoint, said)
            if other is None:
                continue
            moved = (other.config.get("norm_offset") or 0.0) != 0.0
            changed.append(moved or other.spec != resolved(checkpoint).spec)
        assert not changed or any(changed), f"{quantity.name}: no option changes anything"


def model_or_none(checkpoint: Memory, said: tuple[str, ...]) -> Resolved | None:
    """None: it is refused by name, and not because the key is unknown."""
    try:
        return resolved(checkpoint, None, said)
    except ConfigError as error:
        pytest.fail(f"a key that --set does not know: {error}")
    except UnsupportedModel:
        return None


def test_norms_that_were_stored_around_another_number() -> None:
    shapes = llama(97, 32, 16)
    torch.manual_seed(0)
    tensors = Memory({name: torch.randn(shape) for name, shape in shapes.items()})
    plain, moved = resolved(tensors), resolved(tensors, None, ("norm_offset=1.0",))
    for ours in ("norm.weight", "layers.0.attn.norm.weight", "layers.0.ffn.norm.weight"):
        source, fields = moved.names.resolve(ours)
        stored = as_tensor(tensors.read(str(plain.names.resolve(ours)[0])))
        assert not isinstance(source, str)
        assert torch.equal(source.fn(stored, **fields), stored + 1)
    assert moved.names.resolve("layers.0.attn.q.weight") == plain.names.resolve("layers.0.attn.q.weight")
