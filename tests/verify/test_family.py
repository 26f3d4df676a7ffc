"""`plait verify --family`: small models of any family, and what is found wrong with one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.common.registry import FAMILIES, families_by_name
from plait.kernels.load import executor
from plait.ops.activation import multiply
from plait.ops.registry import REGISTRY, Variant
from plait.request import TokenLogprobs
from plait.verify.family import _check_variant, _compare_replies, check_plugin, write_tiny_model
from plait.verify.results import VerifyReply
from tests.families.parity import Memory, decoder, resolved, whole

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 3, "intermediate_size": 48, "num_key_value_heads": 1}
SSM = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2}
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "bamba": {**SSM, "mamba_expand": 2, "attn_layer_indices": [1]},  # A from A_log
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "recurrent_gemma": {"sliding_window": 8, "intermediate_size": 96},  # one tensor of two
    "phi3": {},  # q, k and v of one tensor
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_has_every_tensor_that_its_family_reads(name: str, tmp_path: Path) -> None:
    write_tiny_model(replace(families_by_name()[name], tiny={**SIZES, **TINY[name]}), tmp_path)
    checkpoint = Memory(load_file(tmp_path / "model.safetensors"))
    model = decoder(resolved(checkpoint, json.loads((tmp_path / "config.json").read_text())), checkpoint)
    assert whole(model, torch.arange(9)).isfinite().all()


def test_tiny_model_of_a_family_without_a_config_says_what_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"family llama.*tiny="):
        write_tiny_model(families_by_name()["llama"], tmp_path)


def test_family_check_finds_a_kernel_that_is_wrong_or_not_a_number() -> None:
    made = executor(1)

    def off(x: Tensor, y: Tensor) -> Tensor:
        return x * y + 1

    def lost(x: Tensor, y: Tensor) -> Tensor:
        return x * y * math.nan

    def right(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    kinds = {fn.__name__: Variant(fn.__name__, "cpu", fn, lambda facts: None) for fn in (off, lost, right)}
    found = {name: _check_variant(multiply, variant, made) for name, variant in kinds.items()}
    if made is not None:
        made.close()
    assert {name: finding.is_right for name, finding in found.items()} == {
        "off": False,
        "lost": False,
        "right": True,
    }
    refused = _check_variant(multiply, Variant("none", "cpu", right, lambda facts: "no"), None)
    assert not refused.is_right, "no case is no proof"


PLUGIN = """
from operator import mul

from plait.families.common.registry import family
from plait.ops.activation import multiply
from plait.ops.elementwise import elementwise_op

@family("ProductForCausalLM", model_types=("product",))
def product(c): ...

@elementwise_op()
def triple_product(x, y):
    return x * y

def own(x, y):
    return x * y + 1

triple_product.variant("made", on="cpu")(mul)  # as a kernel that `@elementwise` makes
multiply.variant("own", on="cpu")(own)
"""


@pytest.mark.parametrize("is_loaded", [True, False])
def test_family_check_begins_with_the_kernels_of_its_plug_in(tmp_path: Path, is_loaded: bool) -> None:
    (path := tmp_path / "product.py").write_text(PLUGIN)
    known, ops, variants = set(FAMILIES), set(REGISTRY), list(multiply.variants)
    try:
        if is_loaded:
            found = check_plugin("product", EngineConfig(plugins=(str(path),)))
        else:
            found = check_plugin(str(path), EngineConfig())
        first = {result.name: result.is_right for result in (next(found), next(found))}
    finally:
        for name in FAMILIES.keys() - known:
            del FAMILIES[name]
        for name in REGISTRY.keys() - ops:
            del REGISTRY[name]
        multiply.variants[:] = variants
        del sys.modules[next(name for name in sys.modules if name.startswith("plait_plugin_product"))]
    assert first == {"op multiply: own": False, "op triple_product: made": True}


@pytest.mark.parametrize(
    ("ours", "is_right"),
    [([-1.0, -2.0], True), ([-1.0, -2.1], False), ([-1.0, math.nan], False), ([], False)],
)
def test_family_check_compares_what_both_generate(ours: list[float], is_right: bool) -> None:
    def reply(*logprobs: float) -> Mapping[str, VerifyReply]:
        rows = [TokenLogprobs(i, logprob) for i, logprob in enumerate(logprobs)]
        return {"a": VerifyReply([row.token_id for row in rows], rows)}

    assert _compare_replies(reply(*ours), reply(-1.0, -2.0)).is_right is is_right
