"""DeepSeek-V4.1 against its description: shared entries and choices, candidates, streams, merged n-grams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import CheckpointError, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.families.config.checks import check_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.spec.branches import HyperBranchSpec
from plait.spec.model import ModelSpec
from plait.spec.recurrent import NgramSpec
from plait.spec.sparse import SharedCompressedSpec
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.v41_oracle import CONFIG, TEXT, checkpoint, hash_rows, logits

TOLERANCE = 1e-4
IDS = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(3)) for n in (23, 17)]


def stored(changes: Mapping[str, object] | None = None) -> tuple[dict[str, Any], Memory]:
    text = {**TEXT, **(changes or {})}
    found = {name: tensor.float() for name, tensor in checkpoint(text).items()}
    return {**CONFIG, "text_config": text}, Memory(found)


def wanted(ids: Tensor, changes: Mapping[str, object] | None = None) -> Tensor:
    text = {**TEXT, **(changes or {})}
    return logits(text, checkpoint(text), ids).float()


def attns(spec: ModelSpec) -> list[SharedCompressedSpec]:
    found = [mixer for layer in spec.layers for mixer in (layer[-2].mixer,)]
    inner = [mixer.parts["inner"] for mixer in found if isinstance(mixer, HyperBranchSpec)]
    return [mixer for mixer in inner if isinstance(mixer, SharedCompressedSpec)]


@torch.inference_mode()
def test_whole_prompts_and_chunks_of_two_give_the_described_logits() -> None:
    config, tensors = stored()
    model, want = decoder(resolved(tensors, config), tensors), [wanted(ids) for ids in IDS]
    assert worst(whole(model, IDS[0]), want[0]) <= TOLERANCE
    for got, each in zip(in_pieces(model, IDS), want, strict=True):
        assert worst(got, each) <= TOLERANCE


NO_CANDIDATES = {"candidate_source_layer_id": -1}
EARLY = {"kv_source_layer_ids": [0, 2], "index_source_layer_ids": [0, 2], **NO_CANDIDATES}


@pytest.mark.parametrize(
    "changes",
    [
        NO_CANDIDATES,
        {"candidate_topk_blocks": 1, "candidate_block_size": 5},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {**EARLY, "compress_ratios": [1, 1, 2, 2, 2, 2]},
        {"engram_layer_ids": [0, 5], "engram_max_ngram_size": 4, "engram_num_embeddings": [200, 260]},
    ],
)
@torch.inference_mode()
def test_other_layers_share_and_each_part_changes_logits(changes: dict[str, object]) -> None:
    config, tensors = stored(changes)
    model, want = decoder(resolved(tensors, config), tensors), wanted(IDS[0], changes)
    assert worst(whole(model, IDS[0]), want) <= TOLERANCE
    assert worst(want, wanted(IDS[0])) > 0.01


@torch.inference_mode()
def test_tensors_may_lie_in_a_model_next_to_what_sees() -> None:
    config, tensors = stored()
    inner = Memory({f"model.{name}": tensor for name, tensor in tensors.items() if name != "head.weight"})
    inner["lm_head.weight"], first = tensors["head.weight"], "model.layers.0.ffn.gate"
    inner |= {"vision.blocks.0.weight": torch.zeros(2), "aligner.w1.weight": torch.zeros(2)}
    inner |= {"image_start": torch.zeros(2), f"{first}.bias_vl": torch.zeros(6)}
    inner |= {"mtp.0.attn.wq_a.weight": torch.zeros(2)}
    model = decoder(resolved(inner, config), inner)
    assert worst(whole(model, IDS[0]), wanted(IDS[0])) <= TOLERANCE


def test_hashes_are_those_of_merged_ids_with_padding_in_front() -> None:
    specs = list(build_spec(CONFIG)[0].mixers_of(NgramSpec))
    assert [spec.rows for spec in specs] == [70, 133]
    merged = [token % 40 for token in range(97)]
    for layer, spec in zip((1, 4), specs, strict=True):
        rows = hash_rows(TEXT, merged, [7, 9, 2, 7], layer)
        first = [merged[9] * spec.factors[0] ^ merged[7] * spec.factors[1]]
        first += [first[0] ^ merged[TEXT["engram_pad_token_id"]] * spec.factors[2]]
        starts = [sum(spec.sizes[:k]) for k in range(4)]
        numbers = [first[k // 2] % spec.sizes[k] + starts[k] for k in range(4)]
        assert rows[1].tolist() == numbers


def test_a_table_with_an_id_that_is_not_there_is_refused() -> None:
    config, tensors = stored()
    name = "layers.1.engram.token_map"
    tensors[name] = torch.full_like(tensors[name], 40)
    with pytest.raises(CheckpointError, match="has merged ids 40 to 40; there are 40"):
        decoder(resolved(tensors, config), tensors)


def test_ranks_divide_groups_of_heads_and_hashes_and_keep_entries_whole() -> None:
    whole_spec = build_spec(CONFIG)[0]
    spec, cuts = divide_model(whole_spec, Rank(index=1, size=2, shares=2))
    assert [a.num_heads for a in attns(spec)] == [2] * 6
    assert [replace(a, num_heads=4, groups=2) for a in attns(spec)] == attns(whole_spec)
    assert [s.own for s in spec.mixers_of(NgramSpec)] == [(2, 4)] * 2
    assert not [name for name in cuts if ".index." in name or ".compressor." in name]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"compress_ratios": [0, 4, 2, 1, 1, 1]}, "0, 1 or 2 for each of 6 layers"),
        ({"compress_ratios": [0, 2, 2]}, "for each of 6 layers"),
        ({"kv_source_layer_ids": [1, 5]}, r"kv_source_layer_ids \[1, 5\] make keys"),
        ({"kv_source_layer_ids": [1, 9]}, r"kv_source_layer_ids \[1, 9\] must be numbers of 6 layers"),
        ({"index_source_layer_ids": [0, 1, 2, 3, 4]}, "layer 0 has a compress_ratio of 0"),
        ({"compress_ratios": [0, 2, 1, 1, 1, 1]}, "layer 2 reads entries of 1 tokens"),
        ({"compress_ratios": [2, 2, 2, 1, 1, 1]}, "layer 0 reads entries of 2 tokens"),
        ({"candidate_source_layer_id": 5}, "candidate_source_layer_id 5 must be among"),
        ({"candidate_source_layer_id": 2}, "no layer behind it among kv_source_layer_ids"),
        ({"o_groups": 3}, "4 heads are in 3 groups"),
        ({"qk_rope_head_dim": 14}, "14 numbers are rotated in heads of 12"),
        ({"num_hash_layers": 3}, "num_hash_layers = 3"),
        ({"q_head_norm": True}, "q_head_norm = True"),
        ({"hc_pre_from_prev_sublayer": False}, "hc_pre_from_prev_sublayer = False"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ({"hc_mult": 4096}, "4096 residual streams"),
        ({"engram_layer_ids": [1, 6]}, "must name layers once"),
        ({"engram_num_embeddings": [70]}, "a number of rows for each"),
        ({"engram_max_ngram_size": 1}, "n-grams up to 1 tokens"),
        ({"engram_compressed_vocab_size": 98}, "98 merged ids of 97"),
        ({"engram_pad_token_id": 97}, "with 97 in front"),
        ({"engram_pad_token_id": 1.5}, "1.5 is no whole number"),
        ({"engram_layer_ids": [True, 4]}, "True is no whole number"),
        ({"kv_source_layer_ids": [True]}, "must be numbers of"),
        ({"candidate_block_size": 0}, "size is 0"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, object], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        check_spec(build_spec({**CONFIG, "text_config": {**TEXT, **change}})[0])


FP8 = r"\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight$"
FP4 = r"\.ffn\.experts\.\d+\.w[123]\.weight$"
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def pack(name: str, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes and exponents as the published files have them, and the numbers that they are."""
    made = torch.Generator().manual_seed(len(name))
    rows, cols = shape
    height = 1 if ".embed." in name or re.search(FP4, name) else 32
    exponents = torch.randint(122, 126, (-(-rows // height), -(-cols // 32)), generator=made).byte()
    scale = exponents.view(torch.float8_e8m0fnu)
    factors = 2.0 ** (exponents.float() - 127)
    factors = factors.repeat_interleave(height, 0)[:rows].repeat_interleave(32, 1)[:, :cols]
    stem = name.removesuffix("weight")
    if re.search(FP4, name):
        codes = torch.randint(0, 16, shape, generator=made)
        both = (codes[:, ::2] | codes[:, 1::2] << 4).byte().view(torch.int8)
        return {name: both, f"{stem}scale": scale}, NIBBLES[codes] * factors
    numbers = (2 * torch.randn(shape, generator=made)).to(torch.float8_e4m3fn)
    return {name: numbers, f"{stem}scale": scale}, numbers.float() * factors


@torch.inference_mode()
def test_blocks_of_32_and_nibbles_of_the_published_files_are_read(tmp_path: Path) -> None:
    config, plain = stored({"q_lora_rank": 32, "moe_intermediate_size": 32, "engram_head_dim": 6})
    packed = dict(plain)
    for name in plain:
        if re.search(rf"{FP8}|{FP4}|\.engram\.(embed|wkv)\.weight$", name) and ".compressor." not in name:
            parts, numbers = pack(name, plain.shape(name))
            packed |= parts
            plain[name] = numbers
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, tmp_path / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    raw = {**config, "quantization_config": {**said, "activation_scheme": "dynamic", "expert_dtype": "fp4"}}
    files = QuantizedCheckpoint(SafetensorsFiles(tmp_path / "model.safetensors"), find_scheme(raw, {}))
    assert files.format_of("layers.0.ffn.experts.0.w1.weight") == "mxfp4"
    assert files.format_of("layers.0.attn.wq_a.weight") == "fp8"
    got = whole(decoder(resolved(files, raw), files), IDS[0])
    assert worst(got, whole(decoder(resolved(plain, config), plain), IDS[0])) <= TOLERANCE
