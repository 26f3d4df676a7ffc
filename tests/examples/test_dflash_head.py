"""A head of DFlash is trained end to end, and Plait computes what the plain torch of the example does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_draft_head
from dflash_head import DFlashHead, DFlashSizes
from safetensors.torch import load_file

from plait import LLM, SamplingParams
from plait.checkpoint.weights import Target, Weights
from plait.families.dflash import resolve_dflash
from plait.model.dflash import DFlashHead as Loaded
from plait.model.eagle import StateReader
from plait.model.token_conv import BlockRows
from plait.runner.host.block_passes import BlockForm, plan_blocks
from plait.spec.draft_heads import DFlashSpec
from plait.spec.model import ModelSpec, NormSpec
from tests.families.parity import CPU, Memory, worst
from tests.families.test_dflash import Session

SIZES = DFlashSizes(
    hidden_size=32,
    vocab_size=50,
    heads=2,
    head_dim=16,
    intermediate_size=48,
    max_len=64,
    mask_token=7,
    taps=(1, 2, 3),
)


def test_a_head_is_trained_for_a_hybrid_and_drafts(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_draft_head, "AT_ONCE", 40)
    monkeypatch.setattr(train_draft_head, "LENGTH", 24)
    arguments = ["--model", str(nano_hybrid), "--out", str(tmp_path / "head"), "--threads", "1"]
    more = ["--draft-vocab", "256", "--replies", "40", "--steps", "2", "--kind", "dflash"]
    assert train_draft_head.main([*arguments, *more]) == 0
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
    found, params = [], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for words in ({}, {"speculate": str(tmp_path / "head"), "num_draft_tokens": 7}):
        with LLM(str(nano_hybrid), device="cpu", threads=1, max_model_len=128, **words) as llm:
            found.append(llm.generate("And it came to pass", params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@torch.inference_mode()
def test_a_saved_head_drafts_as_in_training(tmp_path: Path) -> None:
    """Blocks at two places of a text, at once in training and one after the other here."""
    torch.manual_seed(3)
    table, tokens = torch.randn(50, 32).bfloat16(), torch.arange(0, 50, 2)
    head = DFlashHead(SIZES, tokens, table[7].float())
    for weight in head.parameters():
        weight.copy_((weight + torch.randn_like(weight) * 0.1).bfloat16())
    head.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    found = resolve_dflash(config, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    spec, target = found.spec, Target(CPU, torch.float32, 64, 32)
    assert isinstance(spec, DFlashSpec)
    model = ModelSpec("llama", 32, 50, ((),) * 4, NormSpec(), 64)
    weights = Weights(Memory({**stored, "embed_tokens.weight": table}), found.names, target)
    reader, loaded = StateReader(spec, weights, model), Loaded(spec, weights, None, model, weights)
    weights.check_all_used()
    ids, states = torch.randint(0, 50, (1, 12)), torch.randn(1, 12, 96)
    wanted = head.draft(table.float()[ids], states, torch.tensor([4, 9]), 7)
    shown = reader(dict(zip(SIZES.taps, states[0].split(32, -1), strict=True)))
    session, form = Session(loaded, loaded.groups), BlockForm(spec.most, spec.mask_token, spec.from_last)
    for n, (start, end) in enumerate(((0, 4), (4, 9))):
        plan = session.plan(start, ids[0, start + 1 : end + 1])
        loaded.keep(session.batch(plan), session.store, shown[start:end])
        batch = session.batch(plan_blocks(plan, 7, form))
        last = loaded.compute(batch, session.store, BlockRows.of(torch.tensor([0, 8])))
        assert worst(loaded.logits(last)[:, tokens], wanted[0, n]) <= 1e-4
