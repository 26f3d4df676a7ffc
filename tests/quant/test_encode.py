"""Quantizing into block formats: against the public quantizer, a plain grid, and extreme blocks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait import LLM, SamplingParams
from plait.config import EngineConfig, Quantize
from plait.errors import BadFile, ConfigError, ShapeMismatch, UnsupportedFormat
from plait.quant.encode import ENCODERS, encoder, find_encoder
from tests.families import tiny

ALL = pytest.mark.parametrize("name", ENCODERS)
PUBLIC = pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
GROUP = {"q6_k": 16}  # numbers that share a scale; 32 in all others
TOP = {"q4_k": 15, "q5_k": 31}
SHAPES = {
    "normal": lambda: torch.randn(64, 512) * 0.02,
    "heavy tails": lambda: torch.distributions.StudentT(3.0).sample((64, 512)) * 0.02,
    "positive": lambda: torch.rand(64, 512) + 0.5,
    "negative": lambda: -torch.rand(64, 512),
    "rows of very different size": lambda: torch.randn(64, 512) * torch.logspace(-4, 3, 64).unsqueeze(1),
}
DATA = pytest.mark.parametrize("shape", SHAPES)


def decoded(name: str, x: Tensor) -> Tensor:
    return encoder(name)(x).dequantize(torch.float32)


def error(got: Tensor, x: Tensor) -> float:
    return float((got.double() - x.double()).square().mean().sqrt())


@ALL
@DATA
def test_the_public_decoder_reads_the_blocks_as_ours_does(name: str, shape: str) -> None:
    weight = encoder(name)(SHAPES[shape]())
    oracle = dequantize(weight.data.numpy(), GGMLQuantizationType(weight.kind.type_id))
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(oracle.copy()))
    assert weight.shape == (64, 512)
    assert weight.format == name.upper()


@PUBLIC
@DATA
def test_the_error_is_not_above_the_public_quantizers(name: str, shape: str) -> None:
    x = SHAPES[shape]()
    kind = GGMLQuantizationType(encoder(name).kind.type_id)
    theirs = torch.from_numpy(dequantize(quantize(x.numpy(), kind), kind).copy())
    # Formats without an offset are made for errors that count by the size of the number.
    weight = x.abs() if name in ("q4_0", "q5_0") else torch.ones(())
    blocks = [((t - x).square() * weight).view(-1, 32).sum(1) for t in (decoded(name, x), theirs)]
    assert error(decoded(name, x), x) <= error(theirs, x)
    # So it is in any one block, up to the rounding of its scale to float16, which may fall either way.
    # Blocks are left out where scales are so small that float16 has few bits for them.
    usual = x.view(-1, 32).abs().amax(1) > 0.05
    assert bool((blocks[0] <= blocks[1] * 1.02)[usual].all())


def plain_grid(name: str, x: Tensor) -> Tensor:
    """Every group on a grid from its least to its largest number, the scales in float32."""
    groups = x.view(-1, GROUP.get(name, 32))
    if name == "q6_k":
        step = groups.abs().amax(1, keepdim=True) / 31
        return ((groups / step).round() * step).view_as(x)
    low = groups.amin(1, keepdim=True).clamp(max=0)
    step = (groups.amax(1, keepdim=True) - low) / TOP[name]
    return (((groups - low) / step).round() * step + low).view_as(x)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
@DATA
def test_k_formats_lose_little_by_their_packed_scales(name: str, shape: str) -> None:
    x = SHAPES[shape]()
    assert error(decoded(name, x), x) <= 1.05 * error(plain_grid(name, x), x)


@DATA
@pytest.mark.parametrize("order", ["q4_0 q5_0 q8_0", "q4_1 q5_1 q8_0", "q4_k q5_k q8_0", "q5_0 q6_k q8_0"])
def test_more_bits_are_less_error(order: str, shape: str) -> None:
    x = SHAPES[shape]()
    errors = [error(decoded(name, x), x) for name in order.split()]
    assert all(more < 0.7 * fewer for fewer, more in pairwise(errors))


@ALL
def test_blocks_of_zeros_stay_zeros(name: str) -> None:
    x = torch.zeros(3, 512)
    x[1, 256:] = torch.randn(256)
    got = decoded(name, x)
    assert torch.equal(got[0], x[0])
    assert torch.equal(got[1, :256], x[1, :256])


@ALL
def test_one_outlier_keeps_its_value_and_its_sign(name: str) -> None:
    for value in (5.0, -5.0, 1000.0, -60000.0):
        x = torch.full((1, 256), 1e-3)
        x[0, 37] = value
        got = decoded(name, x)
        assert got[0, 37].item() == pytest.approx(value, rel=2e-2)
        assert float((got - x).abs().sum() - (got - x)[0, 37].abs()) <= abs(value) * 1e-2 + 0.3


@ALL
@pytest.mark.parametrize("value", [1.0, -1.0, 0.037, -250.0])
def test_constant_blocks_are_nearly_exact(name: str, value: float) -> None:
    x = torch.full((2, 256), value)
    torch.testing.assert_close(decoded(name, x), x, rtol=5e-3, atol=0)


@ALL
@pytest.mark.parametrize("size", [1e-4, 1e-7, 1e-9, 1e-20, 1e-38, 1e-42])
def test_numbers_below_the_smallest_scale_become_small_ones(name: str, size: float) -> None:
    """The smallest float16 is 6e-8: what is lost is never more than what a block of it could hold."""
    x = torch.randn(4, 512) * size
    got = decoded(name, x)
    assert bool(got.isfinite().all())
    assert float((got - x).abs().max()) <= max(0.2 * float(x.abs().max()), 6e-8 * 16)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -65504.0])
def test_what_no_block_can_hold_is_refused_by_the_tensors_name(name: str, bad: float) -> None:
    x = torch.randn(300, 512)
    x[211, 100] = bad
    with pytest.raises(BadFile, match=r"layers\.3\.attn\.q\.weight: its largest number is"):
        encoder(name)(x, "layers.3.attn.q.weight", threads=2)


@pytest.mark.sampled(3)
@ALL
@given(st.lists(st.floats(-60000, 60000, width=32), min_size=256, max_size=256))
@settings(max_examples=25, deadline=None)
def test_any_block_comes_back_within_two_steps_of_the_widest_grid(name: str, values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    got = decoded(name, x)
    bits = {"4": 4, "5": 5, "6": 6, "8": 8}[name[1]]
    span = float(x.max().clamp(min=0) - x.min().clamp(max=0))
    assert float((got - x).abs().max()) <= 2 * max(span, 2 * float(x.abs().max())) / (2**bits - 1) + 1e-5


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_views_and_threads_give_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(70, 1024) * 0.1).to(dtype)
    data = encoder(name)(x.float()).data
    assert torch.equal(encoder(name)(x, threads=3).data, data)
    strided = torch.zeros(70, 1500, dtype=dtype)[:, 100:1124].copy_(x)
    assert torch.equal(encoder(name)(strided).data, data)
    assert torch.equal(encoder(name)(x[5:9]).data, data[5:9])


@ALL
def test_no_rows_are_no_bytes(name: str) -> None:
    assert encoder(name)(torch.zeros(0, 512)).shape == (0, 512)


def test_columns_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"up\.weight: Q4_K wants .* multiple of 256.*\[4, 96\]"):
        encoder("q4_k")(torch.zeros(4, 96), "up.weight")


@pytest.mark.parametrize(
    ("name", "cols", "kind"),
    [
        ("q4_k", 512, "Q4_K"),
        ("q4_k", 576, "Q5_0"),
        ("q5_k", 96, "Q5_1"),
        ("q6_k", 32, "Q8_0"),
        ("q4_0", 32, "Q4_0"),
        ("q4_0", 48, None),
        ("q6_k", 48, None),
    ],
)
def test_narrow_rows_take_the_next_format_or_none(name: str, cols: int, kind: str | None) -> None:
    found = find_encoder(name, cols)
    assert (found.kind.name if found else None) == kind


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedFormat, match="'q3_k' is not one of q8_0, q6_k"):
        encoder("q3_k")
    with pytest.raises(ConfigError, match=r"quantize: 'Q9' is not one of q8_0, q6_k, .*q4_0"):
        EngineConfig(quantize="Q9")  # type: ignore[arg-type]


def test_the_option_offers_exactly_the_formats_there_are() -> None:
    assert set(get_args(Quantize)) == set(ENCODERS)


def written(config: transformers.PretrainedConfig, folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tiny.save(model, folder)
    return folder


SIZES = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2} | {
    "num_key_value_heads": 2
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rows are 64, 80 and 256 numbers: no K-format, none at all, every format. The head is the table."""
    sizes = {**SIZES, "intermediate_size": 256, "head_dim": 20, "tie_word_embeddings": True}
    return written(transformers.LlamaConfig(**sizes), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**SIZES, "intermediate_size": 96, "num_local_experts": 4, "tie_word_embeddings": False}
    return written(transformers.MixtralConfig(**sizes), tmp_path_factory.mktemp("mixtral"))


def loaded(model: Path, **options: Any) -> LLM:
    return LLM(str(model), device="cpu", threads=2, **options)


@pytest.fixture(scope="module")
def plain_nbytes(llama: Path) -> int:
    with loaded(llama) as llm:
        return llm._loaded.target.weights_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ENCODERS))
def test_a_model_loaded_in_blocks_writes_text_in_less_memory(
    name: str, llama: Path, plain_nbytes: int
) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with loaded(llama, quantize=name) as llm:
        out = llm.generate([[5, 9, 11, 2]], greedy)[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (6, "length")
        assert bool(llm.logits([5, 9, 11, 2]).isfinite().all())
        assert llm._loaded.target.weights_nbytes < 0.7 * plain_nbytes


def test_each_matrix_takes_the_format_of_its_width(llama: Path) -> None:
    with loaded(llama, quantize="q4_k") as llm:
        found = llm._loaded.target.encoded
    # q, k, v, gate, up of two layers and the head have 64 columns; down has 256, o has 80.
    assert found == {"Q5_0": 11, "Q4_K": 2, "float32 as it was": 2}


def test_experts_are_encoded_and_what_chooses_them_is_not(mixtral: Path) -> None:
    with loaded(mixtral, quantize="q8_0") as llm:
        assert llm._loaded.target.encoded == {"Q8_0": 2 * (4 + 4 * 3) + 1, "float32 as it was": 2}


def test_a_file_in_blocks_stays_as_it_is_and_the_log_says_so(
    smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(smollm2, quantize="q4_0", max_model_len=64, ops="reference") as llm:
        assert set(llm._loaded.target.encoded) == {"Q4_1 as it was", "Q8_0 as it was"}
    assert [r for r in caplog.records if r.levelname == "WARNING" and "nothing was encoded" in r.message]
