"""Ranks of a GGUF model in several files, each with other storages: each needs its rows and columns alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from plait.checkpoint.divided import Cuts
from plait.checkpoint.readers.gguf import GgufFile
from plait.checkpoint.weights import Target, Weights
from plait.families.common.resolved import Resolved
from plait.model.decoder import Decoder
from plait.model.divide import divide_model
from plait.ops.blocks import random_weight
from plait.ops.ranks import Comm
from plait.partition import Range, Rank
from plait.quant.gguf import Gguf
from tests.families.parity import CPU, LONGEST, decoder, in_pieces, resolved, worst
from tests.model.together import run_ranks

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 256, 4, 2, 128, 768, 96, 2
METADATA = {
    "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
    "attention.value_length": DIM, "rope.dimension_count": DIM, "vocab_size": VOCAB,
}  # fmt: skip
# Of each matrix: (storage, rows, columns, which of both ranks of two divide, and where the second begins).
MATRICES = {
    "attn_q": ("Q4_K", HEADS * DIM, HIDDEN, "rows", 256),
    "attn_k": ("Q6_K", KV_HEADS * DIM, HIDDEN, "rows", 128),
    "attn_v": ("Q8_0", KV_HEADS * DIM, HIDDEN, "rows", 128),
    "attn_output": ("Q5_K", HIDDEN, HEADS * DIM, "cols", 256),
    "ffn_gate": ("F16", INNER, HIDDEN, "rows", 256),  # three blocks of the file's largest: one, and two
    "ffn_up": ("Q4_0", INNER, HIDDEN, "rows", 256),
    "ffn_down": ("IQ4_XS", HIDDEN, INNER, "cols", 256),
}
IDS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (19, 7)
]
CLOSE = 1e-5


def add_matrix(writer: gguf.GGUFWriter, name: str, storage: str, rows: int, cols: int) -> None:
    if storage == "F16":
        writer.add_tensor(name, (torch.randn(rows, cols) / cols**0.5).half().numpy())
        return
    weight = random_weight(storage, rows, cols)
    assert isinstance(weight, Gguf)
    kind = gguf.GGMLQuantizationType[storage]
    writer.add_tensor(name, weight.data.contiguous().numpy(), raw_dtype=kind)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("splits"))


def write_splits(folder: Path) -> Path:
    """Seven files, up to three tensors in each: the path of the first."""
    torch.manual_seed(2)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=3)
    for key, value in METADATA.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_tensor("token_embd.weight", torch.randn(VOCAB, HIDDEN).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(HIDDEN).numpy())
    add_matrix(writer, "output.weight", "Q8_0", VOCAB, HIDDEN)
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", (torch.randn(HIDDEN) / 8 + 1).numpy())
        for name, (storage, rows, cols, *_) in MATRICES.items():
            add_matrix(writer, f"blk.{i}.{name}.weight", storage, rows, cols)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(folder.glob("m-*.gguf"))
    assert [path.name for path in found] == [f"m-0000{n}-of-00007.gguf" for n in range(1, 8)]
    return found[0]


def opened(path: Path) -> tuple[Resolved, GgufFile]:
    file = GgufFile(path)
    return resolved(file, gguf=file.metadata), file


def others(file: GgufFile, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The bytes of each tensor that only the other rank of two needs: views of this mapping of the file."""
    for i in range(LAYERS):
        for name, (_, _, cols, which, at) in MATRICES.items():
            stored = file.read(f"blk.{i}.{name}.weight")
            raw = stored.data if isinstance(stored, Gguf) else stored.view(torch.uint8)
            if which == "rows":
                yield name, raw[at:] if rank == 0 else raw[:at]
            else:
                place = raw.shape[1] * at // cols
                yield name, raw[:, place:] if rank == 0 else raw[:, :place]


def logits_of_two(path: Path, *, damage: bool) -> list[list[Tensor]]:
    """Of each rank. `damage`: bytes that it does not need are overwritten in its mapping before it loads."""

    def work(comm: Comm) -> list[Tensor]:
        found, file = opened(path)
        if damage:
            for _, raw in others(file, comm.rank.index):
                raw.fill_(0xFF)  # not a number, in every storage with scales of 16 bits
        target = Target(CPU, torch.float32, LONGEST, HIDDEN)
        target.cuts = Cuts.for_rank(comm, lambda rank: divide_model(found.spec, rank)[1])
        weights = Weights(file, found.names, target)
        model = Decoder(divide_model(found.spec, comm.rank)[0], weights)
        weights.check_all_used()
        return in_pieces(model, IDS, target.block_size)

    return run_ranks(work, 2, block=256)


def test_two_ranks_of_a_split_file_give_the_logits_of_one(first: Path) -> None:
    found, file = opened(first)
    wanted = in_pieces(decoder(found, file), IDS)
    for logits in logits_of_two(first, damage=False):
        assert max(worst(a, b) for a, b in zip(logits, wanted, strict=True)) < CLOSE


def test_a_rank_needs_no_byte_of_the_rows_and_columns_that_another_has(first: Path) -> None:
    whole, damaged = logits_of_two(first, damage=False), logits_of_two(first, damage=True)
    for one, other in zip(whole, damaged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    _, file = opened(first)
    some = {name: raw.numel() for name, raw in others(file, 0)}
    assert some.keys() == MATRICES.keys()
    assert all(some.values())


def resident_nbytes(path: Path) -> int:
    """Bytes of this file that are in this process's memory, in all mappings of it."""
    found, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_own = line.endswith(str(path))
        elif is_own and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says which pages are in memory")
def test_the_pages_of_rows_that_another_rank_has_are_not_read(tmp_path: Path) -> None:
    """A gate of 16 MiB in a file of its own; a few pages around what is touched are mapped with it."""
    rows, cols = 8192, 2048
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    writer.add_tensor("small", torch.ones(4).numpy())
    quarter = torch.randint(0, 100, (rows, cols // 32 * 34), dtype=torch.uint8)
    writer.add_tensor("large", quarter.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    second = tmp_path / "m-00002-of-00002.gguf"
    file = GgufFile(tmp_path / "m-00001-of-00002.gguf")
    weight = file.read("large")
    assert isinstance(weight, Gguf)
    before = resident_nbytes(second)
    own: Range = Rank(1, 2).divide(rows, "rows")[0]
    assert torch.isfinite(weight.rows(*own).data.float().sum())
    share = (resident_nbytes(second) - before) / second.stat().st_size
    assert 0.45 < share < 0.55
