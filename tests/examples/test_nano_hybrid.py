"""The nano hybrid: what its checkpoint holds, and that its training script works end to end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import train_nano_hybrid
from nano_hybrid import checkpoint, corpus
from nano_hybrid.model import NanoConfig, NanoHybrid, ssd
from safetensors import safe_open
from tokenizers import Tokenizer

MOST_BYTES = 20 * 2**20
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "mtp.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
WORDS = (
    "and",
    "the",
    "of",
    "to",
    "in",
    "that",
    "he",
    "shall",
    "unto",
    "for",
    "his",
    "LORD",
    "they",
    "be",
    "not",
)


def tiny_text(path: Path) -> Path:
    """Twelve documents of ten lines of common words, drawn with a fixed seed."""
    rng = random.Random(1)
    blocks = []
    for _ in range(12):
        lines = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 20))) for _ in range(10)]
        blocks.append("\n".join(lines))
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


def mamba2_shapes(c: dict) -> dict[str, list[int]]:
    """The tensors of one Mamba2 layer, with one group of B and C."""
    d, heads, state = c["hidden_size"], c["mamba2_num_heads"], c["mamba2_state_size"]
    inner = heads * c["mamba2_head_dim"]
    channels, rows = inner + 2 * state, 2 * inner + 2 * state + heads
    return {
        "mamba2.norm.weight": [d],
        "mamba2.norm.bias": [d],
        "mamba2.mixer.in_proj.weight": [rows, d],
        "mamba2.mixer.in_proj.bias": [rows],
        "mamba2.mixer.conv1d.weight": [channels, 1, c["mamba2_conv_kernel"]],
        "mamba2.mixer.conv1d.bias": [channels],
        "mamba2.mixer.dt_bias": [heads],
        "mamba2.mixer.A_log": [heads],
        "mamba2.mixer.D": [heads],
        "mamba2.mixer.norm.weight": [inner],
        "mamba2.mixer.out_proj.weight": [d, inner],
        "mamba2.mixer.out_proj.bias": [d],
    }


def attention_shapes(c: dict) -> dict[str, list[int]]:
    """The tensors of one layer of latent attention and experts."""
    d, heads, rope, inner = c["hidden_size"], c["num_attention_heads"], c["d_rope"], c["intermediate_size"]
    latent, query = c["kv_latent_dim"], c["q_latent_dim"]
    shapes = {
        "input_layernorm.weight": [d],
        "post_attention_layernorm.weight": [d],
        "self_attn.w_dkv.weight": [latent, d],
        "self_attn.w_dq.weight": [query, d],
        "self_attn.w_uq.weight": [d, query],
        "self_attn.w_uk.weight": [d, latent],
        "self_attn.w_uv.weight": [d, latent],
        "self_attn.w_qr.weight": [heads * rope, d],
        "self_attn.w_kr.weight": [rope, d],
        "self_attn.o_proj.weight": [d, d],
        "moe.router.gate.weight": [c["num_experts"], d],
    }
    for expert in [f"experts.{index}" for index in range(c["num_experts"])] + ["shared_expert"]:
        shapes[f"moe.{expert}.gate_proj.weight"] = [inner, d]
        shapes[f"moe.{expert}.up_proj.weight"] = [inner, d]
        shapes[f"moe.{expert}.down_proj.weight"] = [d, inner]
    return shapes


def expected_shapes(c: dict) -> dict[str, list[int]]:
    """Every tensor that a checkpoint with this config.json holds."""
    whole = [c["vocab_size"], c["hidden_size"]]
    shapes = {"embed_tokens.weight": whole, "norm.weight": [c["hidden_size"]], "lm_head.weight": whole}
    for index in range(c["num_layers"]):
        layer = mamba2_shapes(c) if index in c["mamba_layers"] else attention_shapes(c)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def assert_is_checkpoint(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", "pt") as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: view.get_shape() for name, view in views.items()} == expected_shapes(config)
        assert {view.get_dtype() for view in views.values()} == {"BF16"}
        assert file.metadata() is None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert [tokenizer.token_to_id(special) for special in corpus.SPECIALS] == [0, 1, 2, 3]
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": 0}


def test_checkpoint_is_complete_and_small(nano_hybrid: Path) -> None:
    assert sorted(file.name for file in nano_hybrid.iterdir()) == sorted(FILES)
    assert sum(file.stat().st_size for file in nano_hybrid.iterdir()) <= MOST_BYTES


def test_checkpoint_holds_exactly_the_tensors_of_its_config(nano_hybrid: Path) -> None:
    assert_is_checkpoint(nano_hybrid)


def test_config_has_the_keys_of_the_layout(nano_hybrid: Path) -> None:
    config = json.loads((nano_hybrid / "config.json").read_text())
    assert set(config) == {
        *("hidden_size", "num_layers", "vocab_size", "num_attention_heads", "rms_norm_eps", "max_seq_len"),
        *("mamba2_num_heads", "mamba2_head_dim", "mamba2_state_size", "mamba2_chunk_size", "mamba2_expand"),
        *("mamba2_conv_kernel", "kv_latent_dim", "q_latent_dim", "d_rope", "num_experts", "experts_per_tok"),
        *("shared_expert_enabled", "intermediate_size", "mamba_layers"),
    }
    assert config["rms_norm_eps"] == 1e-5
    assert config["mamba_layers"] == [0, 1, 3, 4]


def test_saved_decay_is_nearer_to_its_start_than_to_zero(nano_hybrid: Path) -> None:
    """A reader that chooses between saved and assumed A by distance must choose the saved one."""
    model = checkpoint.load_model(nano_hybrid)
    for index in model.config.mamba_layers:
        a_log = model.layers[index].mamba2.mixer.A_log
        start = torch.arange(1, len(a_log) + 1).float().log()
        assert torch.dist(a_log, start) < torch.dist(a_log, torch.zeros_like(a_log))


def test_trained_model_knows_its_text(nano_hybrid: Path) -> None:
    """A famous verse costs far less than an untrained model would pay, which is ln(vocab) per token."""
    model = checkpoint.load_model(nano_hybrid)
    tokenizer = Tokenizer.from_file(str(nano_hybrid / "tokenizer.json"))
    ids = tokenizer.encode("In the beginning God created the heaven and the earth.").ids
    loss = torch.nn.functional.cross_entropy(model.logits(ids)[:-1], torch.tensor(ids[1:]))
    assert loss < 4.0


@pytest.mark.slow
def test_training_script_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tiny_text(tmp_path / "text.txt")
    out = tmp_path / "out"
    arguments = ["--text", str(text), "--out", str(out), "--steps", "2", "--vocab", "300", "--threads", "1"]
    assert train_nano_hybrid.main([*arguments, "--tokens-per-step", "128", "--sample-tokens", "3"]) == 0
    assert_is_checkpoint(out)
    assert {file.name for file in out.iterdir()} == {*FILES} - {"mtp.safetensors"}
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert "chat: Tell me of David." in printed


def test_training_script_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train_nano_hybrid.main(["--out", str(tmp_path / "out")]) == 1
    assert "apt-get install bible-kjv" in capsys.readouterr().err


def test_text_of_one_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only one block\nof two lines\n")
    with pytest.raises(ValueError, match="has 1 documents; give at least 2"):
        corpus.read_file(path)


def test_chat_has_no_newline_between_its_parts(tmp_path: Path) -> None:
    tokenizer = corpus.train_tokenizer(corpus.read_file(tiny_text(tmp_path / "text.txt")), 300)
    ids = corpus.encode_chat(tokenizer, "the LORD", "he shall", system="in all")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|system|>in all<|user|>the LORD<|assistant|>he shall<|endoftext|>"
    assert [token for token in ids if token < 4] == [1, 2, 3, 0]


def test_held_out_documents_are_not_trained_on() -> None:
    documents = [corpus.Document(f"chapter {index}", (f"passage {index}",)) for index in range(45)]
    training, held_out = corpus.hold_out(documents)
    assert [document.title for document in held_out] == ["chapter 19", "chapter 39"]
    assert len(training) == 43
    assert not set(training) & set(held_out)


@pytest.mark.parametrize("time", [1, 31, 32, 33, 80])
def test_chunked_recurrence_equals_one_step_at_a_time(time: int) -> None:
    x, b, c = torch.randn(2, time, 3, 4), torch.randn(2, time, 5), torch.randn(2, time, 5)
    decay = -torch.rand(2, time, 3)
    state, rows = torch.zeros(2, 3, 4, 5), []
    for t in range(time):
        state = decay[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * b[:, t, None, None, :]
        rows.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]))
    torch.testing.assert_close(ssd(x, decay, b, c, 32), torch.stack(rows, 1), rtol=1e-4, atol=1e-4)


def test_model_is_causal() -> None:
    sizes = dict(hidden_size=32, num_layers=3, vocab_size=50, mamba2_num_heads=4, mamba2_head_dim=16)
    model = NanoHybrid(NanoConfig(**sizes, mamba2_chunk_size=8, mamba_layers=(0, 2))).eval()
    ids = [random.randrange(50) for _ in range(21)]
    torch.testing.assert_close(model.logits(ids)[:13], model.logits(ids[:13]), rtol=1e-4, atol=1e-5)
