"""Adapters of PEFT over GGUF: converters reorder rows and inputs, and an adapter's have to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.adapters.adapter_file import AdapterFile
from plait.checkpoint.adapters.match import AdapterMatch
from plait.checkpoint.adapters.peft import open_peft
from plait.checkpoint.names import NameMap, make_derived
from plait.errors import UnsupportedFormat
from plait.families.common.resolved import Resolved
from plait.families.gguf.adapter_orders import find_orders
from plait.quant.weight import as_tensor
from tests.families import as_gguf_plain
from tests.families.as_gguf import converted
from tests.families.gguf.test_config import OLD, VARIANTS, made
from tests.families.parity import Memory, decoder, resolved
from tests.loading.adapters.made import linear_modules, write_peft

# Factors of Falcon-H1's config are in the numbers of its file. GPT-2's and StarCoder 1's modules are turned.
NAMES = [name for name in (*VARIANTS, *OLD) if not name.startswith(("falcon_h1", "gpt2", "gpt_bigcode"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def match_published(found: Resolved, file: AdapterFile) -> AdapterMatch:
    return AdapterMatch(file, found.hf_names or found.names, find_orders(found, file.path))


def as_gguf(name: str, config: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], Memory]:
    if name in VARIANTS:
        metadata, stored = converted(VARIANTS[name], config, tensors)
    else:
        metadata, stored = as_gguf_plain.convert(OLD[name], config, tensors)
    return metadata, Memory(stored)


def read(names: NameMap, stored: Memory, ours: str) -> Tensor:
    source, fields = names.resolve(f"{ours}.weight", stored)
    if isinstance(source, str):
        return stored[source].float()
    found = make_derived(source, [stored[one] for one in source.sources], fields, ours)
    return as_tensor(found).float()


def weights_of(found: Resolved, stored: Memory, match: AdapterMatch) -> list[str]:
    """Our names of what a decoder reads and the adapter changes."""
    seen, resolve = list[str](), NameMap.resolve

    def record(self: NameMap, name: str, present: Any = None) -> Any:
        seen.append(name)
        return resolve(self, name, present)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NameMap, "resolve", record)
        decoder(found, stored)
    ours = dict.fromkeys(name.removesuffix(".weight") for name in seen if name.endswith(".weight"))
    return [name for name in ours if match.has(name)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_peft_adapter_over_gguf_changes_weights_as_the_converted_merged_model(
    folder: Path, name: str
) -> None:
    config, tensors, _ = made(name, folder)
    changes = write_peft(folder / f"{name}-peft", tensors, linear_modules(tensors))
    merged = {**tensors}
    for module, change in changes.items():
        merged[f"{module}.weight"] = tensors[f"{module}.weight"] + 2.0 * change
    metadata, before = as_gguf(name, config, tensors)
    after = as_gguf(name, config, merged)[1]
    found = resolved(before, gguf=metadata)
    match = match_published(found, open_peft(folder / f"{name}-peft", 64))
    ours = weights_of(found, before, match)
    assert ours
    for one in ours:
        factors = match.take(one)
        assert factors is not None
        wanted = read(found.names, after, one) - read(found.names, before, one)
        torch.testing.assert_close(factors.product(), wanted, rtol=1e-4, atol=1e-5, msg=f"{name}: {one}")


def test_layers_without_positions_are_reordered_with_the_others(folder: Path) -> None:
    """Their scores do not depend on the order, but an adapter of a row of q is of that very row."""
    config, tensors, _ = made("smollm3_plain", folder)
    metadata, stored = as_gguf("smollm3_plain", config, tensors)
    found = resolved(stored, gguf=metadata)
    kinds = {getattr(mixer, "rope", None) is None for name, mixer in found.spec.mixers() if "attn" in name}
    assert kinds == {True, False}
    write_peft(folder / "peft", tensors, linear_modules(tensors))
    match = match_published(found, open_peft(folder / "peft", 64))
    plain = AdapterMatch(match.file, found.hf_names or found.names)
    layers = range(len(found.spec.layers))
    moved = [not torch.equal(_up(match, i), _up(plain, i)) for i in layers]
    assert all(moved)


def _up(match: AdapterMatch, layer: int) -> Tensor:
    factors = match.take(f"layers.{layer}.attn.q")
    assert factors is not None
    return factors.up


def test_file_with_factors_in_its_numbers_refuses_peft_by_name(folder: Path) -> None:
    config, tensors, _ = made("falcon_h1", folder)
    metadata, stored = as_gguf("falcon_h1", config, tensors)
    write_peft(folder / "h1", tensors, linear_modules(tensors))
    with pytest.raises(
        UnsupportedFormat, match=r"falcon_h1 has numbers with factors .* convert_lora_to_gguf"
    ):
        match_published(resolved(stored, gguf=metadata), open_peft(folder / "h1", 64))
