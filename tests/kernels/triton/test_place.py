"""Triton's store of heads and latents: what the caches hold, next to those of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.weights import Target, Weights
from plait.kernels.load import load_for_gpu
from plait.kernels.triton.attention.compressed import front
from plait.kernels.triton.attention.place import place_all_heads, place_whole_latent
from plait.model.decoder import Decoder
from plait.ops.attention import paged_attention
from plait.ops.chip import EXAMPLES
from plait.ops.entry import Codes, key_codes, latent_codes, value_codes
from plait.ops.place import HEAD_CASES, LATENT_CASES, place_heads, place_latent
from tests.families import tiny
from tests.families.parity import CPU, Memory, decoder, in_pieces, resolved
from tests.ops.test_variants import copied

DTYPES = (torch.float32, torch.float16)
MODELS = ("ministral", "gemma3", "deepseek_v3_plain", "zamba2")


def assert_same_entries(found: torch.Tensor, wanted: torch.Tensor, form: Codes, near: float) -> None:
    """Entries are alike; codes may differ by one where a number is near the middle of two."""
    if found.dtype is torch.int8:
        steps = wanted[..., : form.columns].float().abs().clamp(min=1)
        found, wanted = form.decode(found), form.decode(wanted)
        assert ((found - wanted).abs() > near).float().mean() < 0.02
        scales = (wanted[..., : form.columns].abs() / steps).amax(-1, keepdim=True)
        assert ((found - wanted).abs() <= scales * 1.01 + near).all()
    else:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=near, atol=near)


def by_entries(cache: torch.Tensor, form: Codes) -> torch.Tensor:
    """A cache of codes, which the kernel writes as [codes of a block, scales of a block], entry by entry."""
    if cache.dtype is not torch.int8:
        return cache
    lead, flat = cache.shape[:-1], cache.flatten(1)
    codes, scales = flat.split(
        [lead[1:].numel() * form.columns, flat.shape[1] - lead[1:].numel() * form.columns], 1
    )
    return torch.cat([codes.reshape(*lead, -1), scales.reshape(*lead, -1)], -1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HEAD_CASES, ids=str)
def test_keys_and_values_are_stored_as_the_reference_stores_them(case: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    args, _ = place_heads.make(case, dtype, "cpu")  # type: ignore[misc]
    wanted, given = copied(args), copied(args)
    place_heads.reference(*wanted)
    (front.place if "v_dim" in case else place_all_heads)(*given)
    near = 1e-2 if given[3].dtype is torch.bfloat16 else place_heads.tolerance[dtype]
    for i, form in ((3, key_codes(case["dim"])), (4, value_codes(case["dim"]))):
        assert_same_entries(by_entries(given[i], form), wanted[i], form, near)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latents_are_stored_as_the_reference_stores_them(case: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    args, _ = place_latent.make(case, dtype, "cpu")  # type: ignore[misc]
    wanted, given = copied(args), copied(args)
    place_latent.reference(*wanted)
    place_whole_latent(*given)
    coded = given[4].dtype in (torch.bfloat16, torch.int8)
    near = 2e-2 if coded else place_latent.tolerance[dtype]
    assert_same_entries(given[4], wanted[4], latent_codes(case["kv_rank"], case["rope_dim"]), near)


@pytest.mark.parametrize("case", [HEAD_CASES[1], HEAD_CASES[5]], ids=str)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(case: Any) -> None:
    args, _ = place_heads.make(case, torch.float32, "cpu")  # type: ignore[misc]
    whole, alone = copied(args), copied(args)
    out = place_all_heads(*whole)
    for t in range(case["tokens"]):
        q, k, v, k_cache, v_cache, slots, positions, *how = alone
        one = slice(t, t + 1)
        part = place_all_heads(q[one], k[one], v[one], k_cache, v_cache, slots[one], positions[one], *how)
        assert torch.equal(part[0], out[t])
    assert torch.equal(alone[3], whole[3])
    assert torch.equal(alone[4], whole[4])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_on_gpu_kernels_what_they_compute_on_references(name: str, tmp_path: Path) -> None:
    load_for_gpu()
    tiny.write(name, tmp_path)
    config, tensors, _ = tiny.read(tmp_path)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    ids = [torch.arange(23) * 7 % 20 + 1, torch.arange(17) * 3 % 20 + 1]
    ours, wanted = (in_pieces(decoder(found, checkpoint, chip=chip), ids) for chip in (EXAMPLES[90], None))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def bound(name: str, folder: Path, **options: Any) -> dict[str, str]:
    """(op, variant) of what a tiny model binds on an example of a GPU."""
    load_for_gpu()
    tiny.write(name, folder)
    config, tensors, _ = tiny.read(folder)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    target = Target(CPU, torch.float32, 64, found.spec.hidden_size, chip=EXAMPLES[90], **options)
    Decoder(found.spec, Weights(checkpoint, found.names, target))
    return {row.op: row.variant for row in target.bound}


def test_what_writes_a_cache_is_bound_with_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bound("ministral", tmp_path)
    assert rows["place_heads"] == rows["paged_attention"] == "triton"
    assert "place_heads" not in bound("ministral", tmp_path, no_fuse=("place_heads",))
    assert "place_heads" not in bound("ministral", tmp_path, ops="reference")
    others = [v for v in paged_attention.variants if v.name != "triton"]
    monkeypatch.setattr(paged_attention, "variants", others)
    rows = bound("ministral", tmp_path)
    assert rows["paged_attention"] == "sdpa"
    assert "place_heads" not in rows, "it would write entries that the other kernel does not read"


def test_what_is_no_number_stays_none_in_codes() -> None:
    case = dict(tokens=1, heads=2, kv_heads=2, dim=32, pairs=16, over=None, kv_dtype="int8")
    args, _ = place_heads.make(case, torch.float32, "cpu")  # type: ignore[misc]
    args[2][0, 1, 3] = float("nan")
    place_all_heads(*args)
    stored = value_codes(32).decode(by_entries(args[4], value_codes(32)).flatten(0, 1)[args[5]])[0]
    assert stored[0].isfinite().all()
    assert not stored[1].isfinite().any()
