"""GGUF files: what a good one gives, and that a bad one is refused, by type, at once and without memory."""

from __future__ import annotations

import math
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.checkpoint.readers.gguf import GgufFile
from plait.errors import BadFile, CheckpointError, MissingTensor, ShapeMismatch, UnsupportedFormat
from plait.quant.fp4 import Fp4
from plait.quant.gguf import BLOCK_TYPES, Gguf, block_type

U32, BOOL, STRING, ARRAY = 4, 7, 8, 9
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def entry(
    name: str | bytes = "a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, num_dims: int = -1
) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims) if num_dims < 0 else num_dims) + shape + struct.pack(
        "<IQ", kind, offset
    )  # fmt: skip


def header(keys: list[bytes], entries: list[bytes], counts: tuple[int, int] | None = None) -> bytes:
    num_tensors, num_keys = counts or (len(entries), len(keys))
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(keys) + b"".join(entries)


def whole(keys: list[bytes], entries: list[bytes], data: bytes = bytes(32), **more: Any) -> bytes:
    raw = header(keys, entries, **more)
    return raw + bytes(-len(raw) % 32) + data


def opened(path: Path, raw: bytes) -> GgufFile:
    path.write_bytes(raw)
    return GgufFile(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def written(path: Path, **options: Any) -> dict[str, np.ndarray]:
    """A file by the public writer, with every kind of value; returns the plain tensors."""
    rng = np.random.default_rng(0)
    tensors = {
        "norm": rng.standard_normal(64).astype(np.float32),
        "half": rng.standard_normal((3, 64)).astype(np.float16),
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "experts": rng.standard_normal((2, 4, 64)).astype(np.float32),
    }
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("scale", 0.5)
    writer.add_float64("wide", 0.1)
    writer.add_bool("yes", True)
    writer.add_int64("low", -(1 << 40))
    writer.add_array("heads", [4, 0, 4])
    writer.add_array("flags", [True, False])
    writer.add_string("template", "{{ é }}")
    writer.add_token_list(["a", "é", b"\xc3"])  # type: ignore[arg-type]
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    packed = gguf.quants.quantize(tensors["experts"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_what_the_public_writer_wrote_is_read(path: Path) -> None:
    tensors = written(path)
    file = GgufFile(path)
    assert set(file.names()) == {*tensors, "packed"}
    for name, values in tensors.items():
        found = file.read(name)
        assert isinstance(found, torch.Tensor)
        assert file.shape(name) == values.shape
        assert file.nbytes(name) == values.nbytes
        assert found.tolist() == values.tolist()
    assert file.format_of("half") == "float16"
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["scale"] == 0.5
    assert file.metadata["wide"] == 0.1
    assert file.metadata["yes"] is True
    assert file.metadata["low"] == -(1 << 40)
    assert file.metadata["heads"] == [4, 0, 4]
    assert file.metadata["flags"] == [True, False]
    assert file.metadata["template"] == "{{ é }}"


def test_token_strings_keep_their_bytes(path: Path) -> None:
    written(path)
    tokens = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    assert [t.encode("utf-8", "surrogateescape") for t in tokens] == [b"a", "é".encode(), b"\xc3"]


def long_lists(words: list[bytes], flags: bytes) -> list[bytes]:
    """Keys with as many strings and bools as a vocabulary has."""
    strings = struct.pack("<IQ", STRING, len(words)) + b"".join(map(text, words))
    bools = struct.pack("<IQ", BOOL, len(flags)) + flags
    return [ARCHITECTURE, key("words", ARRAY, strings), key("flags", ARRAY, bools), u32("last", 7)]


def test_long_lists_stay_in_the_file(path: Path) -> None:
    words = [b"\xc3" + str(i).encode() for i in range(10_000)]
    metadata = opened(path, whole(long_lists(words, bytes([1, 0]) * 5_000), [entry()])).metadata
    assert list(metadata) == ["general.architecture", "words", "flags", "last"]
    for _ in range(2):
        assert [w.encode("utf-8", "surrogateescape") for w in metadata["words"]] == words
        assert metadata["flags"] == [True, False] * 5_000
    assert (metadata["last"], metadata.get("other", 3), "words" in metadata, "word" in metadata) == (
        7,
        3,
        True,
        False,
    )
    assert metadata["words"] is not metadata["words"], "nothing holds them"


@pytest.mark.parametrize("damage", ["a string's length", "a bool"])
def test_damage_in_long_lists_is_found_when_the_file_is_opened(path: Path, damage: str) -> None:
    words, flags = [b"word"] * 10_000, bytearray(10_000)
    if damage == "a bool":
        flags[9_000] = 2
    raw = bytearray(whole(long_lists(words, bytes(flags)), [entry()]))
    if damage != "a bool":
        at = raw.index(text("word") * 3) + 9_000 * len(text("word"))
        raw[at : at + 8] = struct.pack("<Q", 1 << 40)
    with pytest.raises(BadFile, match=r"a string of words passes the end|flags has a bool"):
        opened(path, bytes(raw))


def test_stacked_experts_are_rows_and_keep_their_shape(path: Path) -> None:
    tensors = written(path)
    file = GgufFile(path)
    weight = file.read("packed")
    assert isinstance(weight, Gguf)
    assert file.shape("packed") == (2, 4, 64)
    assert weight.shape == (8, 64)
    assert file.nbytes("packed") == weight.nbytes == 8 * 2 * 34
    assert file.format_of("packed") == "Q8_0"
    second = weight.rows(4, 8).dequantize(torch.float32)
    torch.testing.assert_close(second, torch.from_numpy(tensors["experts"][1]), atol=0.02, rtol=0)


@pytest.mark.parametrize("factors", [[0.5], [0.5, 3.0]])
def test_four_bit_floats_have_a_factor_of_their_own(path: Path, factors: list[float]) -> None:
    blocks = bytes(range(1, 73))
    entries = [
        entry("a.weight", (64, 1, 2), 40),
        entry("a.scale", (len(factors),), 0, 96),
        entry("a.input_scale", (1,), 0, 128),
    ]
    data = blocks + bytes(24) + struct.pack(f"<{len(factors)}f", *factors)
    file = opened(path, whole([ARCHITECTURE], entries, data + bytes(256 - len(data))))
    assert list(file.names()) == ["a.weight"]
    assert "a.scale" not in file
    weight = file.read("a.weight")
    assert isinstance(weight, Fp4)
    plain = Gguf(torch.tensor(list(blocks), dtype=torch.uint8).view(2, 36), block_type("NVFP4"))
    want = plain.dequantize(torch.float32) * torch.tensor(factors).view(-1, 1)
    assert torch.equal(weight.dequantize(torch.float32), want)


def test_factors_that_fit_no_rows_are_refused(path: Path) -> None:
    entries = [entry("a.weight", (64, 2), 40), entry("a.scale", (3,), 0, 96)]
    file = opened(path, whole([ARCHITECTURE], entries, bytes(256)))
    with pytest.raises(ShapeMismatch, match="3 factors of a NVFP4 weight"):
        file.read("a.weight")


def test_a_vector_of_a_block_type_is_decoded(path: Path) -> None:
    block = struct.pack("<e32b", 0.5, *range(32))
    file = opened(path, whole([ARCHITECTURE], [entry(dims=(32,), kind=8)], block))
    assert file.read("a").tolist() == [0.5 * j for j in range(32)]  # type: ignore[union-attr]


def test_reads_are_views_and_never_reach_the_file(path: Path) -> None:
    file = opened(path, whole([ARCHITECTURE], [entry()]))
    before = path.read_bytes()
    file.read("a").fill_(7)  # type: ignore[union-attr]
    assert file.read("a").tolist() == [7.0] * 8  # type: ignore[union-attr]
    assert path.read_bytes() == before


def test_tensors_outlive_the_file_object(path: Path) -> None:
    file = opened(path, whole([ARCHITECTURE], [entry()], np.arange(8, dtype="<f4").tobytes()))
    tensor = file.read("a")
    file.close()
    with pytest.raises(MissingTensor):
        file.read("a")
    del file
    assert tensor.tolist() == list(range(8))  # type: ignore[union-attr]


def test_a_smaller_alignment_than_the_dtype_wants_is_read(path: Path) -> None:
    keys = [ARCHITECTURE, u32("general.alignment", 1)]
    raw = header(keys, [entry()])
    assert len(raw) % 4
    file = opened(path, raw + np.arange(8, dtype="<f4").tobytes())
    assert file.read("a").tolist() == list(range(8))  # type: ignore[union-attr]


def test_version_2_is_read(path: Path) -> None:
    raw = bytearray(whole([ARCHITECTURE], [entry()]))
    raw[4] = 2
    assert list(opened(path, bytes(raw)).names()) == ["a"]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (b"\x01\0\0\0", "version 1"),
        (b"\x04\0\0\0", "version 4"),
        (b"\0\0\0\x03", r"big-endian \(version 3\)"),
        (b"\0\0\0\0", "version 0"),
        (b"\xff\xff\xff\xff", "version 4294967295"),
    ],
)
def test_other_versions_are_refused_by_name(path: Path, version: bytes, said: str) -> None:
    raw = whole([ARCHITECTURE], [entry()])
    with pytest.raises(UnsupportedFormat, match=said):
        opened(path, raw[:4] + version + raw[8:])


@pytest.mark.parametrize(("kind", "name"), [(4, "Q4_2"), (36, "IQ4_NL_4_4"), (6000, "unknown"), (999, "999")])
def test_other_tensor_types_are_refused_by_name(path: Path, kind: int, name: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"(?s){name}.*supported: F32.*Q4_K"):
        opened(path, whole([ARCHITECTURE], [entry(dims=(256,), kind=kind)], bytes(1024)))


LIES = (0xFFFF, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
ONE = [entry()]
BAD = {
    "empty file": b"",
    "magic alone": b"GGUF",
    "another magic": b"GGML" + bytes(60),
    "no architecture": whole([u32("x", 1)], ONE),
    "an architecture that is a number": whole([u32("general.architecture", 1)], ONE),
    "no keys": whole([], ONE),
    "a key twice": whole([ARCHITECTURE, u32("x", 1), u32("x", 1)], ONE),
    "an empty key": whole([ARCHITECTURE, u32("", 1)], ONE),
    "a key that is not UTF-8": whole([ARCHITECTURE, key(b"\xff", U32, bytes(4))], ONE),
    "a value type that is not known": whole([ARCHITECTURE, key("x", 13, bytes(8))], ONE),
    "an array type that is not known": whole([ARCHITECTURE, key("x", ARRAY, struct.pack("<IQ", 13, 1))], ONE),
    "a bool of 2": whole([ARCHITECTURE, key("x", 7, b"\2")], ONE),
    "a tensor name twice": whole([ARCHITECTURE], [entry(), entry(offset=32)], bytes(64)),
    "an empty tensor name": whole([ARCHITECTURE], [entry("")]),
    "a tensor name of 65 bytes": whole([ARCHITECTURE], [entry("n" * 65)]),
    "a tensor name that is not UTF-8": whole([ARCHITECTURE], [entry(b"\xfe\xff")]),
    "no dimensions": whole([ARCHITECTURE], [entry(dims=())]),
    "five dimensions": whole([ARCHITECTURE], [entry(dims=(8, 1, 1, 1, 1))]),
    "lying dimensions": whole([ARCHITECTURE], [entry(num_dims=1 << 31)]),
    "a dimension of 0": whole([ARCHITECTURE], [entry(dims=(0, 8))]),
    "dimensions that overflow": whole([ARCHITECTURE], [entry(dims=(1 << 32, 1 << 32))]),
    "dimensions that wrap to 8": whole([ARCHITECTURE], [entry(dims=((1 << 62) + 2, 4))]),
    "half a block": whole([ARCHITECTURE], [entry(dims=(48, 2), kind=8)], bytes(128)),
    "an unaligned offset": whole([ARCHITECTURE], [entry(offset=4)], bytes(64)),
    "an offset past the end": whole([ARCHITECTURE], [entry(offset=64)], bytes(64)),
    "a tensor past the end": whole([ARCHITECTURE], [entry(dims=(9,))]),
    "overlap": whole([ARCHITECTURE], [entry(dims=(16,)), entry("b", offset=32)], bytes(96)),
    "the same offset": whole([ARCHITECTURE], [entry(), entry("b")], bytes(96)),
    "alignment 0": whole([ARCHITECTURE, u32("general.alignment", 0)], ONE),
    "alignment 3": whole([ARCHITECTURE, u32("general.alignment", 3)], ONE),
    "alignment 2^31": whole([ARCHITECTURE, u32("general.alignment", 1 << 31)], ONE),
    "alignment 2^32": whole([ARCHITECTURE, key("general.alignment", 10, struct.pack("<Q", 1 << 32))], ONE),
    "alignment of text": whole([ARCHITECTURE, key("general.alignment", STRING, text("32"))], ONE),
    "alignment of truth": whole([ARCHITECTURE, key("general.alignment", 7, b"\1")], ONE),
    "arrays in arrays in …": whole(
        [ARCHITECTURE, key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000 + struct.pack("<IQ", 0, 0))], ONE
    ),
    "many arrays in arrays": whole(
        [ARCHITECTURE, key("x", ARRAY, struct.pack("<IQ", ARRAY, 1 << 40) + bytes(1 << 16))], ONE
    ),
    "the first of two parts under another name": whole([ARCHITECTURE, u32("split.count", 2)], ONE),
    "a number of parts that is text": whole([ARCHITECTURE, key("split.count", STRING, text("2"))], ONE),
    "a million parts": whole([ARCHITECTURE, u32("split.count", 1_000_000)], ONE),
    **{f"{n} keys": whole([ARCHITECTURE], ONE, counts=(1, n)) for n in LIES},
    **{f"{n} tensors": whole([ARCHITECTURE], ONE, counts=(n, 1)) for n in LIES},
    **{f"a key of {n} bytes": header([ARCHITECTURE, struct.pack("<Q", n)], [bytes(64)]) for n in LIES},
    **{f"text of {n}": whole([ARCHITECTURE, key("x", STRING, struct.pack("<Q", n))], ONE) for n in LIES},
    **{
        f"an array of {n} of type {kind}": whole(
            [ARCHITECTURE, key("x", ARRAY, struct.pack("<IQ", kind, n))], ONE
        )
        for n in LIES
        for kind in (0, STRING, ARRAY, 12)
    },
    **{f"an offset of {n}": whole([ARCHITECTURE], [entry(offset=n & ~31)], bytes(64)) for n in LIES},
    **{f"a dimension of {n}": whole([ARCHITECTURE], [entry(dims=(n,))]) for n in LIES},
}  # fmt: skip


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_at_once_and_without_memory(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(BadFile):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    keys = [ARCHITECTURE, key("t", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc"))]
    raw = whole([*keys, u32("n", 1)], [entry(), entry("b", (2, 4), offset=32)], bytes(64))
    assert len(list(opened(path, raw).names())) == 2
    for stop in range(len(raw)):
        with pytest.raises(CheckpointError):
            opened(path, raw[:stop])


GOOD = whole(
    [ARCHITECTURE, key("t", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")), u32("n", 1)],
    [entry(), entry("b", (32, 4), kind=2, offset=32)],
    bytes(range(104)),
)


def opens_or_refuses(path: Path, raw: bytes) -> None:
    """No other outcome than a checkpoint of which every tensor can be read, or a CheckpointError."""
    path.write_bytes(raw)
    start = time.monotonic()
    refusal = ""
    tracemalloc.start()
    try:
        file = GgufFile(path)
        for name in file.names():
            value = file.read(name)
            assert math.prod(file.shape(name)) == math.prod(value.shape)
    except CheckpointError as error:
        refusal = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
    assert len(refusal) < 2000
    assert time.monotonic() - start < 30  # it ends; how fast is not this test's business


@FUZZ
@given(data=st.data())
def test_flipped_bytes_never_surprise(path: Path, data: st.DataObject) -> None:
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    opens_or_refuses(path, bytes(raw))


@FUZZ
@given(at=st.integers(4, 180), value=st.sampled_from([0, 1, *LIES]), form=st.sampled_from(["<I", "<Q"]))
def test_lying_numbers_never_surprise(path: Path, at: int, value: int, form: str) -> None:
    raw = bytearray(GOOD)
    struct.pack_into(form, raw, at, value & 0xFFFFFFFF if form == "<I" else value)
    opens_or_refuses(path, bytes(raw))


@FUZZ
@given(tail=st.binary(max_size=300))
def test_noise_after_the_magic_never_surprises(path: Path, tail: bytes) -> None:
    opens_or_refuses(path, b"GGUF\x03\0\0\0" + tail)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in two parts by the public writer."""
    written(tmp_path / "m.gguf", split_max_tensors=3)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert [p.name for p in found] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    return found


def test_any_part_of_a_split_model_opens_all(parts: list[Path]) -> None:
    for part in parts:
        file = GgufFile(part)
        assert set(file.names()) == {"norm", "half", "ids", "experts", "packed"}
        assert file.metadata["general.architecture"] == "llama"
        assert file.read("packed").shape == (8, 64)


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(BadFile, match=r"missing: m-00002-of-00002\.gguf"):
        GgufFile(parts[0])


def test_a_part_in_anothers_place_is_refused(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(BadFile, match="unlike its name"):
        GgufFile(parts[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        split = [u32("split.no", number), u32("split.count", 2), u32("split.tensors.count", 2)]
        (tmp_path / f"x-0000{number + 1}-of-00002.gguf").write_bytes(whole([ARCHITECTURE, *split], ONE))
    with pytest.raises(BadFile, match="'a' is in another part too"):
        GgufFile(tmp_path / "x-00001-of-00002.gguf")


def test_parts_that_hold_fewer_tensors_than_promised_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        split = [u32("split.no", number), u32("split.count", 2), u32("split.tensors.count", 3)]
        raw = whole([ARCHITECTURE, *split], [entry(f"t{number}")])
        (tmp_path / f"x-0000{number + 1}-of-00002.gguf").write_bytes(raw)
    with pytest.raises(BadFile, match="hold 2 tensors, the first says 3"):
        GgufFile(tmp_path / "x-00002-of-00002.gguf")


def test_an_unknown_tensor_is_named(path: Path) -> None:
    with pytest.raises(MissingTensor, match="'nothing'"):
        opened(path, whole([ARCHITECTURE], ONE)).read("nothing")


def test_every_format_of_gemma_decodes_as_the_public_decoder_does(gemma3: Path) -> None:
    file = GgufFile(gemma3)
    first = {file.format_of(name): name for name in file.names()}
    assert {"Q4_K", "Q5_0", "Q6_K", "Q8_0", "float32"} == set(first)
    for name in first.values():
        weight = file.read(name)
        if isinstance(weight, Gguf):
            kind = gguf.GGMLQuantizationType(weight.kind.type_id)
            wanted = gguf.quants.dequantize(weight.rows(0, 64).data.numpy(), kind)
            assert torch.equal(weight.rows(0, 64).dequantize(torch.float32), torch.from_numpy(wanted))
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262144


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_real_files_decode_as_the_public_reader_does(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    file, oracle = GgufFile(path), gguf.GGUFReader(path)
    tensors = {t.name: t for t in oracle.tensors}
    assert set(file.names()) == set(tensors)
    seen: set[str] = set()
    for name, theirs in tensors.items():
        assert file.shape(name) == tuple(int(n) for n in reversed(theirs.shape))
        assert file.nbytes(name) == theirs.n_bytes
        kind = file.format_of(name)
        if kind in seen:
            continue
        seen.add(kind)
        value = file.read(name)
        if isinstance(value, Gguf):
            value, data = value.rows(0, 8).dequantize(torch.float32), theirs.data[:8]
        else:
            data = theirs.data
        wanted = gguf.quants.dequantize(np.array(data), theirs.tensor_type)
        assert torch.equal(value, torch.from_numpy(wanted))
    assert seen & {kind.name for kind in BLOCK_TYPES.values()}
    field = oracle.fields["tokenizer.ggml.tokens"]
    tokens = [t.encode("utf-8", "surrogateescape") for t in file.metadata["tokenizer.ggml.tokens"]]
    assert len(tokens) == len(field.data)
    assert tokens[-100:] == [bytes(field.parts[i]) for i in field.data[-100:]]
