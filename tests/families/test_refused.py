"""Every causal model of transformers is a family, or is refused by a sentence that says why."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.errors import UnsupportedModel
from plait.families.common.refused import DECODERS, REFUSED, why_no_decoder
from plait.families.common.registry import build_spec, families_by_name


def test_every_causal_model_of_transformers_is_built_or_refused_by_name() -> None:
    built = set(families_by_name())
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        assert (kind in built) != (kind in REFUSED), kind
    assert sum(kind in built for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= 178
    assert not built & set(REFUSED)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bart", "encoder next to its decoder"),
        ("bert", "in both directions"),
        ("whisper", "made for sound"),
        ("llada", "diffusion"),
        ("prophetnet", "several tokens at once"),
        ("rembert", "before they are widened"),
        ("gemma4_assistant", "drafts for another model"),
        ("reformer", "random rotations"),
    ],
)
def test_a_refused_kind_is_named_with_its_reason(kind: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{kind}' is not implemented: .*{why}"):
        build_spec({"architectures": ["SomeForCausalLM"], "model_type": kind})


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "DFlashDraftModel", "MedusaModel"])
def test_a_drafter_with_the_type_of_a_model_is_none(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}' is not implemented: it drafts for another model"):
        build_spec({"architectures": [name], "model_type": "llama"})


@pytest.mark.parametrize("kind", DECODERS)
def test_what_may_be_an_encoder_is_built_only_as_a_decoder(kind: str) -> None:
    decoder = {"model_type": kind, "is_decoder": True, "is_encoder_decoder": False}
    assert why_no_decoder(decoder) is None
    for other in ({"is_decoder": False}, {"is_decoder": None}, {"is_encoder_decoder": True}):
        assert DECODERS[kind] in str(why_no_decoder({**decoder, **other}))


def test_an_unknown_architecture_is_still_reported_with_its_nearest() -> None:
    with pytest.raises(UnsupportedModel, match=r"'LlammaForCausalLM' .*the nearest is LlamaFor.*--plugin"):
        build_spec({"architectures": ["LlammaForCausalLM"], "model_type": "llamo"})
