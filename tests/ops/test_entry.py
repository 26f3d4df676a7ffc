"""Codes of the KV cache: how far keys, values and latents are from the numbers, and what entries take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.ops.attention import paged_attention, paged_case
from plait.ops.entry import (
    LARGEST,
    SEVEN_LARGEST,
    Codes,
    Sevens,
    count_mixed,
    head_forms,
    head_widths,
    key_codes,
    latent_codes,
    latent_form,
    latent_width,
    mix_columns,
    value_codes,
)

FORMS = [
    key_codes(64),
    key_codes(40),
    value_codes(20),
    value_codes(64),
    latent_codes(512, 64),
    latent_codes(20, 6),
    Codes(100, 32, 3, 8),
    *(form for form in head_forms(64, torch.int16) if isinstance(form, Codes | Sevens)),
    Sevens(40, 40, mixed=8),
    Sevens(512, 64, 64, 16),
    Sevens(20, 64, 6, 16),
]


def sample(form: Codes | Sevens) -> torch.Tensor:
    """Numbers of many magnitudes, zeros among them."""
    x = torch.randn(200, 3, form.columns + form.rest) * torch.logspace(-30, 30, 200)[:, None, None]
    x[7], x[9, 1] = 0.0, 1e-42
    return x


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_number_is_half_a_step_away_at_most(form: Codes | Sevens) -> None:
    x, largest = sample(form), LARGEST if isinstance(form, Codes) else SEVEN_LARGEST
    entry = form.encode(x)
    assert (entry.dtype, entry.shape) == (form.dtype, (200, 3, form.width))
    found = form.decode(entry)
    mixed = [mix_columns(t[..., : form.columns], form.mixed).split(form.group, -1) for t in (found, x)]
    for got, want in zip(*mixed, strict=True):
        check_steps(got, want, largest)
    got, want = found[..., form.columns :], x[..., form.columns :]
    if isinstance(form, Codes):
        assert torch.equal(got, want.bfloat16().float())
    elif form.rest:
        check_steps(got, want, LARGEST)


def check_steps(got: torch.Tensor, want: torch.Tensor, largest: int) -> None:
    """Numbers of one group are half a step from what they stand for, at most."""
    top = want.abs().amax(-1, keepdim=True)
    step = top / largest * (1 + 2**-8)  # as bfloat16 may round it
    # A scale that bfloat16 rounded down cuts the largest number off, by less than half a step.
    assert ((got - want).abs() <= step / 2 * (1 + 1e-5) + top * 1e-6 + 1e-40).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_was_decoded_has_the_same_codes(form: Codes | Sevens) -> None:
    entry = form.encode(sample(form))
    assert torch.equal(form.encode(form.decode(entry)), entry)


@pytest.mark.parametrize("form", [*FORMS, latent_codes(20, 0)], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
def test_no_tokens_are_no_entries(form: Codes | Sevens, shape: tuple[int, ...]) -> None:
    entry = form.encode(torch.randn(*shape, form.columns + form.rest))
    assert entry.shape == (*shape, form.width)
    assert form.decode(entry).shape == (*shape, form.columns + form.rest)


@pytest.mark.parametrize("dim", [4, 20, 64, 80, 96])
def test_mixing_is_hadamards_matrix_and_its_own_inverse(dim: int) -> None:
    x, count = torch.randn(7, 3, dim, dtype=torch.float64), count_mixed(dim)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < count:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    mixed = mix_columns(x, count)
    assert torch.allclose(mixed.unflatten(-1, (-1, count)), x.unflatten(-1, (-1, count)) @ matrix)
    assert torch.allclose(mix_columns(mixed, count) / count, x)


@pytest.mark.parametrize("kept", [torch.int8, torch.int16, torch.uint8], ids=str)
def test_a_column_of_keys_that_is_far_larger_costs_the_others_little(kept: torch.dtype) -> None:
    keys, form = torch.randn(200, 64), head_forms(64, kept)[0]
    keys[:, 5] += 60
    assert form is not None
    queries = torch.randn(64, 200)
    queries[5] *= 8
    plain = replace(form, mixed=1)
    errors = [((f.decode(f.encode(keys)) - keys) @ queries).square().mean() for f in (form, plain)]
    assert errors[0] < 0.5 * errors[1]


def test_a_column_of_values_that_is_far_larger_costs_the_others_little() -> None:
    values, form = torch.randn(200, 64), value_codes(64)
    values[:, 5] *= 60
    plain = replace(form, mixed=1)
    errors = [(f.decode(f.encode(values)) - values).square().mean() for f in (form, plain)]
    assert errors[0] < 0.2 * errors[1]


def test_both_signs_are_rounded_alike() -> None:
    x, form = torch.randn(50, 64), key_codes(64)
    assert torch.equal(form.decode(form.encode(-x)), -form.decode(form.encode(x)))


def test_an_entry_takes_what_it_says() -> None:
    assert head_widths(64, "int8") == (64 + 2 * 2, 64 + 2)
    assert head_widths(40, "int8") == (40 + 2 * 2, 40 + 2)
    assert head_widths(64, "bfloat16") == head_widths(64, "model") == (64, 64)
    assert latent_width(512, 64, "int8") == 512 + 8 * 2 + 64 * 2
    assert latent_width(20, 6, "int8") == 48  # 20 + 2 + 12, in sixteens
    assert latent_width(512, 64, "float32") == 576


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_int7_takes_half_of_bfloat16_at_most(dim: int) -> None:
    assert sum(head_widths(dim, "int7")) <= dim  # words of two bytes, of which bfloat16 has 2 · dim


def test_int7_latents_take_half_of_bfloat16_at_most() -> None:
    assert latent_width(512, 64, "int7") == 272 < 576 / 2
    assert latent_width(64, 32, "int7") == 48 == (64 + 32) / 2


def test_every_code_of_seven_bits_comes_back() -> None:
    form = latent_form(128, 0, torch.int16)
    assert isinstance(form, Sevens)
    codes = torch.arange(-63, 64).float()
    x = torch.cat([codes, codes[-1:]])[None]
    assert torch.equal(form.decode(form.encode(x)), x)


def test_int8_attention_is_attention_over_rounded_keys_and_values() -> None:
    where, blocks = paged_case([9, 40], "cpu")
    q, k, v = torch.randn(49, 4, 48), torch.randn(49, 2, 48), torch.randn(49, 2, 48)
    forms = key_codes(48), value_codes(48)
    codes = [torch.zeros(blocks, 16, 2, form.width, dtype=torch.int8) for form in forms]
    plain = [torch.zeros(blocks, 16, 2, 48) for _ in range(2)]
    rounded = [form.decode(form.encode(x)) for form, x in zip(forms, (k, v), strict=True)]
    got = paged_attention(q, k, v, *codes, *where, 0.25)
    assert torch.equal(got, paged_attention(q, *rounded, *plain, *where, 0.25))
    assert not torch.equal(got, paged_attention(q, k, v, *plain, *where, 0.25))
