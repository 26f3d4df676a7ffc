"""Qwen4-Exp's n-grams: their hashes, ends of texts, and tables in shards; its ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from plait.errors import CheckpointError, UnsupportedModel
from plait.families.common.registry import build_spec
from plait.model.divide import divide_model
from plait.partition import Rank
from plait.spec.branches import GatedBranchSpec
from plait.spec.model import ModelSpec
from plait.spec.recurrent import NgramSpec
from plait.spec.sparse import MeanSparseSpec
from tests.families import tiny
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.tiny_mixers import QWEN4

END, TOLERANCE = 5, 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    **tiny.SIZES,
    **QWEN4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen4_exp")
    tiny.write("qwen4_exp", made)
    return made


def ngrams(spec: ModelSpec) -> list[NgramSpec]:
    return list(spec.mixers_of(NgramSpec))


@torch.inference_mode()
def test_an_ngram_does_not_reach_over_the_end_of_a_text(folder: Path) -> None:
    """Ends next to each other, at the first token, and where chunks meet."""
    config, tensors, _ = tiny.read(folder)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = [torch.randint(8, 97, (n,), generator=torch.Generator().manual_seed(3)) for n in (23, 17)]
    for i, places in enumerate(((0, 4, 5, 9, 14), (6, 7, 8, 15))):
        ids[i][list(places)] = END
    wanted = [oracle(x[None], use_cache=False).logits[0] for x in ids]
    model = decoder(resolved(Memory(tensors), config), Memory(tensors))
    assert worst(whole(model, ids[0]), wanted[0]) <= TOLERANCE
    for got, want in zip(in_pieces(model, ids), wanted, strict=True):
        assert worst(got, want) <= TOLERANCE
    apart = whole(model, torch.where(ids[0] == END, 6, ids[0]))
    assert worst(apart, wanted[0]) > 0.01


def test_hashes_are_those_that_transformers_writes(folder: Path) -> None:
    config, tensors, _ = tiny.read(folder)
    for layer, own in zip((0, 2), ngrams(build_spec(config)[0]), strict=True):
        at = f"model.layers.{layer}.ple.ple_embedding"
        assert own.factors == tuple(tensors[f"{at}.layer_multipliers"].tolist())
        assert own.sizes == tuple(tensors[f"{at}.ngram_heads_vocab_sizes"].tolist())
        assert own.end == END


def test_a_table_may_be_one_tensor(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    shards: dict[str, list[Tensor]] = {}
    for name in sorted(n for n in tensors if ".shard_" in n):
        shards.setdefault(name.partition(".shard_")[0], []).append(tensors.pop(name))
    assert [len(parts) for parts in shards.values()] == [5, 5]
    tensors |= {f"{name}.weight": torch.cat(parts) for name, parts in shards.items()}
    model = decoder(resolved(Memory(tensors), config), Memory(tensors))
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE
    name = next(iter(shards))
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"ngrams\.table\.weight: the file has shape"):
        decoder(resolved(Memory(tensors), config), Memory(tensors))


def test_names_alone_show_what_it_is_and_ask_for_what_they_do_not(folder: Path) -> None:
    config, tensors, oracle = tiny.read(folder)
    with pytest.raises(UnsupportedModel, match=r"--set indexer_budget=VALUE"):
        resolved(Memory(tensors), None)
    chosen = ("indexer_budget", "indexer_compress_ratio", "eos_token_id", "head_dim")
    said = {key: config[key] for key in chosen}
    hashes = ("ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by")
    heads = ("linear_num_key_heads", "linear_key_head_dim")
    rest = ("num_experts_per_tok", "split_ngram_parts", "rope_parameters", "num_attention_heads")
    said |= {key: config[key] for key in (*hashes, *rest, "num_key_value_heads", *heads)}
    found = resolved(Memory(tensors), {"architectures": ["Qwen4ExpForCausalLM"], **said})
    assert found.spec.layers == build_spec(config)[0].layers
    assert worst(whole(decoder(found, Memory(tensors)), oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE


def test_ranks_divide_heads_and_tables_of_ngrams_and_keep_streams_whole() -> None:
    spec, cuts = divide_model(build_spec(CONFIG)[0], Rank(index=1, size=2, shares=2))
    attn = spec.layers[1][0].mixer
    assert isinstance(attn, GatedBranchSpec)
    inner = attn.parts["inner"]
    assert isinstance(inner, MeanSparseSpec)
    assert (inner.num_heads, inner.num_kv_heads, inner.indexer.num_heads) == (2, 1, 12)
    assert cuts["layers.1.attn.inner.gate"].rows == ((20, 40),)
    assert not [name for name in cuts if "index" in name or not (".inner" in name or "ngrams" in name)]
    whole, part = ngrams(build_spec(CONFIG)[0])[0], ngrams(spec)[0]
    table = next(cut for name, cut in cuts.items() if "ngrams" in name)
    half = len(whole.sizes) // 2
    assert part.own == (half, len(whole.sizes))
    assert table.rows == ((sum(whole.sizes[:half]), sum(whole.sizes)),)
    assert part.rows == sum(whole.sizes[half:])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": 97}, "token 97 of 97"),
        ({"ngram_vocab_size_base": 1 << 40}, "2147483648 rows"),
        ({"ple_layer_ids": [1, 9]}, "layers count from 1"),
        ({"ple_embed_dim": 25}, "heads are equal"),
        ({"indexer_budget": 13}, "whole blocks"),
        ({"indexer_head_dim": 4}, "numbers that are rotated, or more"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2"),
        ({"output_gate_type": "relu"}, "output_gate_type = 'relu'"),
        ({"hc_count": 1}, "1 residual streams"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **change})
