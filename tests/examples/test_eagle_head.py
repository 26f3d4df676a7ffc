"""A head of EAGLE-3 is trained end to end, and Plait computes what the plain torch of the example does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_draft_head
from eagle_head import EagleHead, EagleSizes
from safetensors.torch import load_file

from plait import LLM, SamplingParams
from plait.checkpoint.weights import Target, Weights
from plait.families.eagle import resolve_eagle
from plait.model.eagle import EagleHead as Loaded
from plait.model.eagle import StateReader
from plait.spec.draft_heads import EagleSpec
from plait.spec.model import ModelSpec, NormSpec
from tests.families.parity import CPU, Memory, worst
from tests.families.test_eagle import Session

SIZES = EagleSizes(hidden_size=32, vocab_size=50, heads=2, head_dim=16, intermediate_size=48, max_len=64)


def test_a_head_is_trained_for_a_hybrid_and_drafts(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_draft_head, "AT_ONCE", 40)
    monkeypatch.setattr(train_draft_head, "LENGTH", 24)
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(f"Tell me of {word}." for word in ("David", "bread", "the sea", "Egypt") * 5))
    arguments = ["--model", str(nano_hybrid), "--out", str(tmp_path / "head"), "--threads", "1"]
    more = ["--draft-vocab", "256", "--replies", "40", "--steps", "2", "--prompts", str(lines)]
    assert train_draft_head.main([*arguments, *more]) == 0
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
    found, params = [], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for words in ({}, {"speculate": str(tmp_path / "head"), "num_draft_tokens": 2}):
        with LLM(str(nano_hybrid), device="cpu", threads=1, max_model_len=128, **words) as llm:
            found.append(llm.generate("And it came to pass", params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@torch.no_grad()
def test_a_saved_head_drafts_as_in_training(tmp_path: Path) -> None:
    """Three draft tokens from one place, of the entries that training gives each."""
    torch.manual_seed(3)
    tokens = torch.arange(0, 50, 2)
    head = EagleHead(SIZES, tokens)
    for weight in head.parameters():
        weight.copy_((weight + torch.randn_like(weight) * 0.1).bfloat16())
    head.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    found = resolve_eagle(config, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    spec = found.spec
    assert isinstance(spec, EagleSpec)
    table = torch.randn(50, 32).bfloat16()
    weights = Weights(
        Memory({**stored, "embed_tokens.weight": table}), found.names, Target(CPU, torch.float32, 64, 32)
    )
    model = ModelSpec("llama", 32, 50, ((),) * 8, NormSpec(), 64)
    reader, loaded = StateReader(spec, weights, model), Loaded(spec, weights, None, model, weights)
    ids, states = torch.randint(0, 50, (1, 12)), torch.randn(1, 12, 96)
    e = torch.nn.functional.embedding(ids, table.float())
    g = reader(dict(zip(reader.layers, states[0].split(32, -1), strict=True)))
    assert worst(g, head.fc(states)[0]) <= 1e-5

    place, entries, logits, made = 6, [], [], head.fc(states)
    for step in range(3):
        made = head.midlayer(e[:, step + 1 :], made[:, : 12 - step - 1], entries)
        logits.append(head.lm_head(head.norm(made[:, place]))[0])
    session, last = Session(loaded), g[: place + 1]
    at, known = 0, ids[0, 1 : place + 2]
    for wanted in logits:
        last, drafted = session.draft(at, known, last)
        assert worst(drafted[-1][tokens], wanted) <= 1e-4
        at += len(known)
        last, known = last[-1:], ids[0, at + 1 : at + 2]
