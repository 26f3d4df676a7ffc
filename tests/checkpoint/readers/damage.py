"""Small models in every format, ways to damage their files, and what must hold however they are damaged."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.errors import PlaitError
from plait.loading.open_model import load_decoder, open_model
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import as_tensor
from tests.checkpoint.quantized.packings import PACKINGS, packed_like

ROOM = 1 << 30  # bytes that a damaged file may make us map or allocate beyond what there is
PATIENCE_S = 60.0  # for one file: a busy machine has pauses, an endless loop has none
HIDDEN, WIDTH, VOCAB, LAYERS = 64, 192, 264, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
END = "<end>"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def tensors() -> dict[str, Tensor]:
    """A tiny Llama of random numbers."""
    g = torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 0.2

    found = {"model.embed_tokens.weight": some(VOCAB, HIDDEN), "model.norm.weight": some(HIDDEN)}
    found["lm_head.weight"] = some(VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for x, rows in (("q", 64), ("k", 32), ("v", 32)):
            found[f"{at}.self_attn.{x}_proj.weight"] = some(rows, HIDDEN)
        found[f"{at}.self_attn.o_proj.weight"] = some(HIDDEN, 64)
        found |= {f"{at}.mlp.{x}_proj.weight": some(WIDTH, HIDDEN) for x in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = some(HIDDEN, WIDTH)
        found |= {f"{at}.{x}_layernorm.weight": some(HIDDEN) for x in ("input", "post_attention")}
    return found


def write_text(folder: Path) -> None:
    """A tokenizer of bytes, its config, and a template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: n for n, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": END, "chat_template": TEMPLATE, "added_tokens_decoder": {"256": {"content": END}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256], "temperature": 0.5}))


def write_plain(folder: Path) -> Path:
    """Two shards with an index, a config, a tokenizer and a template."""
    folder.mkdir(parents=True)
    every = tensors()
    names = sorted(every)
    files = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: every[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_text(folder)
    return folder


def write_packed(folder: Path, name: str) -> Path:
    """The same model in one of the packings of quantized safetensors."""
    folder.mkdir(parents=True)
    packing = PACKINGS[name]
    files, _ = packed_like(tensors(), packing)
    save_file({n: t.contiguous().clone() for n, t in files.items()}, folder / "model.safetensors")
    said = {"quantization_config": packing.config} if packing.config else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **said}))
    return folder


def write_gguf(folder: Path) -> Path:
    """A file with every block type, plain types, metadata of every kind and a vocabulary."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN * 4)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_bool("general.flag", True)
    writer.add_array("general.pairs", [[1, 2], [3]])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"w{n}" for n in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["w 0", "w 1"])
    writer.add_eos_token_id(3)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(3)
    kinds = (kind for kind in BLOCK_TYPES.values() if kind.name in gguf.GGMLQuantizationType.__members__)
    for number, kind in enumerate(kinds):
        if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.type_id)][1] != kind.nbytes:
            continue  # Q8_1: the writer counts its sums as wider than files have them
        raw = rng.integers(0, 256, (4, 256 // kind.elements * kind.nbytes), dtype=np.uint8)
        writer.add_tensor(f"blk.0.t{number}.weight", raw, raw_dtype=gguf.GGMLQuantizationType(kind.type_id))
    writer.add_tensor("token_embd.weight", rng.random((VOCAB, HIDDEN * 4), dtype=np.float32))
    writer.add_tensor("output_norm.weight", rng.random(HIDDEN * 4, dtype=np.float32).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


LIES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def damaged(data: bytes, rng: random.Random, front: int = 1 << 16) -> bytes:
    """These bytes with one to three accidents, most of them where headers are."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        size = len(out)
        at = rng.randrange(min(size, front) if rng.random() < 0.8 else size) if size else 0
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + 1] = bytes([out[at] ^ (1 << rng.randrange(8))]) if size else b"x"
            case 2:
                del out[at:]
            case 3:
                form, top = rng.choice((("<I", 32), ("<Q", 64)))
                out[at : at + top // 8] = struct.pack(form, rng.choice(LIES) & ((1 << top) - 1))
            case 4:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 5:
                del out[at : at + rng.randint(1, 64)]
            case _:
                out[at : at + rng.randint(1, 32)] = rng.choice((b"\0", b"\xff", b'"', b"[", b"}", b"9")) * 8
    return bytes(out)


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**18, -(2**62), 0.5, 1e308, -1e-300),
    *(float("nan"), float("inf"), float("-inf"), "", "silu", "x" * 10_000, [], {}, [0], [None] * 5),
    *([-1, 1e9], {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, [[[[]]]]),
    {"full_attention": {"rope_theta": 0}},
)


def hostile(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A JSON value with something in it replaced, removed, renamed or nested without end."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        out, key = dict(value), rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                del out[key]
            case 1:
                out[key + rng.choice("sx_")] = out.pop(key)
            case 2 if depth < 3:
                out[key] = hostile(out[key], rng, depth + 1)
            case 3:
                out[key] = {key: out[key]}
            case _:
                out[key] = rng.choice(VALUES)
        return out
    if isinstance(value, list) and value and rng.random() < 0.5:
        out_list = list(value)
        out_list[rng.randrange(len(value))] = rng.choice(VALUES)
        return out_list * rng.choice((1, 1, 50))
    return rng.choice(VALUES)


@contextmanager
def bounded() -> Iterator[None]:
    """Within, more than `ROOM` bytes beyond what is mapped now are a MemoryError, which no test expects."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def use(model: Path) -> None:
    """Everything that reads a model's files: headers, config, every tensor's numbers, tokenizer, template."""
    opened = open_model(str(model), EngineConfig(device="cpu"))
    for name in opened.checkpoint.names():
        as_tensor(opened.checkpoint.read(name))
    if opened.files.kind == "safetensors":
        target = Target(torch.device("cpu"), torch.float32, 64, opened.resolved.spec.hidden_size)
        load_decoder(opened, target, lambda *_: None)
    opened.language()


def survives(model: Path, what: str) -> bool:
    """Whether the model is still taken. Anything but an error of ours, or a long silence, fails the test."""
    started, told = time.monotonic(), "nothing"
    try:
        with bounded():
            use(model)
        taken = True
    except PlaitError as error:
        taken, told = False, str(error).strip()
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    assert time.monotonic() - started < PATIENCE_S, what
    assert 0 < len(told) < 4000, what
    return taken


def spoiled(model: Path, file: str, data: bytes, what: str) -> bool:
    """The same with one file replaced for the moment."""
    path = model / file
    kept = path.read_bytes()
    # A new file each time: the old one may still be mapped, and a shorter one under it would be a fault.
    path.unlink()
    path.write_bytes(data)
    try:
        return survives(model, what)
    finally:
        path.unlink()
        path.write_bytes(kept)


def keep(folder: Path, model: Path, file: str, data: bytes) -> None:
    """A copy of a damaged model, for looking at by hand."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / file).write_bytes(data)
