"""MLA over an up-projection that is quantized: the logits of its decoded twin, and no decoded copy of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from plait import LLM, SamplingParams
from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.checkpoint.readers.gguf import GgufFile
from plait.checkpoint.storages import Checkpoint
from plait.checkpoint.weights import Target, Weights
from plait.errors import ShapeMismatch
from plait.families.common.resolved import Resolved
from plait.families.oxidizr.weights import _key_value
from plait.model.decoder import Decoder
from plait.model.mixers.mla import Mla
from plait.ops.blocks import random_weight
from plait.ops.heads import HeadRows
from plait.quant.halves import Halves
from tests.checkpoint.quantized.packings import PACKINGS, InMemory
from tests.families import parity, tiny
from tests.families.as_gguf import converted
from tests.families.parity import CPU, LONGEST, Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.test_stays_packed import held

HEADS, NOPE, VALUE, RANK = 4, 32, 24, 256
SIZES = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
NAMES = ("deepseek_v2_lite", "deepseek_v3", "kimi_linear")
ARCHS = {"deepseek_v2_lite": "deepseek2", "deepseek_v3": "deepseek2", "kimi_linear": "kimi-linear"}
FEW = ("Q8_0", "Q4_K", "int4_g64+zeros+order", "fp8_b128")
KINDS = [
    *("Q4_0", "IQ4_NL", "Q2_K", "Q6_K", "IQ2_XS", "IQ1_M", "TQ2_0", *FEW),
    *("int4_g128+zeros", "int3_g32", "int8", "fp8", "mxfp4", "nvfp4", "bnb_nf4"),
]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
IDS = torch.arange(23) * 31 % 97
Model = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Config and tensors of each."""
    found = {}
    for name in NAMES:
        variant = tiny.VARIANTS[name]
        folder = tmp_path_factory.mktemp(name)
        tiny.write(name, folder, replace(variant, changes={**variant.changes, **SIZES}))
        found[name] = tiny.read(folder)[:2]
    return found


@pytest.fixture(autouse=True)
def blocks_that_native_attention_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "BLOCK", 16)


def native(found: Resolved, checkpoint: Checkpoint, cpu: Any) -> Decoder:
    """As `decoder`, with native kernels."""
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size, executor=cpu)
    return Decoder(found.spec, Weights(checkpoint, found.names, target))


def numbers_of(stored: Mapping[str, Any]) -> Memory:
    return Memory({n: t if isinstance(t, Tensor) else t.dequantize(torch.float32) for n, t in stored.items()})


def large(thing: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What is held in numbers and no smaller than half of an up-projection: no other matrix here is."""
    least = HEADS * RANK * min(NOPE, VALUE)
    return [(str(t.dtype), tuple(t.shape)) for t in held(thing) if t.dtype in FLOATS and t.numel() >= least]


def agree(made: Decoder, wanted: Tensor, *, pieces: bool = False, plain: int = 0) -> None:
    """Whole, and in chunks; no numbers are kept afterwards, but `plain` halves that are nothing else."""
    scale = float(wanted.abs().max())
    assert worst(whole(made, IDS), wanted) <= 1e-4 * scale
    assert len(large(made)) == plain
    if pieces:
        for one, other in zip(in_pieces(made, [IDS, IDS[:17]]), [wanted, wanted[:17]], strict=True):
            assert worst(one, other) <= 1e-4 * scale


def with_up_projections(tensors: Mapping[str, Tensor], make: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {n: make(t) if n.endswith("kv_b_proj.weight") else t for n, t in tensors.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in NAMES for kind in (KINDS if name == "deepseek_v3" else FEW)]
)
def test_a_quantized_up_projection_is_its_decoded_twin(
    name: str, kind: str, models: dict[str, Model], cpu: Any
) -> None:
    config, tensors = models[name]
    stored = with_up_projections(tensors, lambda t: random_weight(kind, *t.shape))
    plain, checkpoint = numbers_of(stored), Memory(stored)
    twin = decoder(resolved(plain, config), plain)
    assert len(large(twin)) >= 2  # what would be found
    wanted, found = whole(twin, IDS), resolved(checkpoint, config)
    agree(decoder(found, checkpoint), wanted)
    agree(native(found, checkpoint, cpu), wanted, pieces=kind == "Q4_K")


def test_native_logits_do_not_depend_on_how_a_prompt_was_cut(models: dict[str, Model], cpu: Any) -> None:
    config, tensors = models["deepseek_v3"]
    stored = Memory(with_up_projections(tensors, lambda t: random_weight("Q4_K", *t.shape)))
    made = native(resolved(stored, config), stored, cpu)
    one, other = in_pieces(made, [IDS, IDS[:17]])
    assert torch.equal(one, whole(made, IDS))
    assert torch.equal(other, one[:17])


@pytest.mark.parametrize("name", {packing.format: name for name, packing in PACKINGS.items()}.values())
def test_packings_of_every_format_of_safetensors(name: str, models: dict[str, Model], cpu: Any) -> None:
    config, tensors = models["deepseek_v3"]
    files, plain = InMemory(), Memory(tensors)
    for key, tensor in tensors.items():
        if not key.endswith("kv_b_proj.weight"):
            files[key] = tensor
            continue
        parts, numbers = PACKINGS[name].make(*tensor.shape)
        files.update({key.removesuffix("weight") + part: value for part, value in parts.items()})
        plain[key] = torch.from_numpy(numbers).float()
    said = PACKINGS[name].config
    checkpoint = QuantizedCheckpoint(files, find_scheme({"quantization_config": said}) if said else None)
    wanted = whole(decoder(resolved(plain, config), plain), IDS)
    agree(native(resolved(checkpoint, config), checkpoint, cpu), wanted)


def write_gguf(path: Path, metadata: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """stored: tensors, or (blocks, shape)."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in metadata.items():
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, value in stored.items():
        if isinstance(value, Tensor):
            writer.add_tensor(name, value.contiguous().numpy())
        else:
            blocks, shape = value
            kind = gguf.GGMLQuantizationType(blocks.kind.type_id)
            writer.add_tensor(name, blocks.data.view(*shape[:-1], -1).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def as_blocks(
    arch: str, kinds: tuple[str, ...], config: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """(metadata, a file's tensors, its decoded twin's). Two kinds: of keys and values apart; one: of both."""
    metadata, stored = converted(arch, config, tensors)
    found: dict[str, Any] = {}
    for name, tensor in stored.items():
        block = name.rpartition("attn_")[0]
        if "attn_k_b" in name and len(kinds) == 1:
            shape: tuple[int, ...] = (HEADS * (NOPE + VALUE), RANK)
            found[f"{block}attn_kv_b.weight"] = random_weight(kinds[0], *shape), shape
        elif "attn_k_b" in name or ("attn_v_b" in name and len(kinds) == 2):
            kind = kinds["attn_v_b" in name]
            shape = tuple(tensor.shape)
            plain = kind == "plain"
            found[name] = tensor if plain else (random_weight(kind, shape[0] * shape[1], shape[2]), shape)
        elif "attn_v_b" not in name:
            found[name] = tensor
    plain_ones = {
        n: t if isinstance(t, Tensor) else t[0].dequantize(torch.float32).view(t[1]) for n, t in found.items()
    }
    return metadata, found, plain_ones


@pytest.mark.parametrize(
    "kinds",
    [
        *(("Q8_0", "Q4_K"), ("IQ4_NL", "IQ2_XS"), ("plain", "Q6_K"), ("Q4_0", "plain")),
        *(("Q6_K",), ("IQ3_S",), ("Q8_0",)),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "deepseek_v3")]
)
def test_gguf_split_and_joined(
    name: str, kinds: tuple[str, ...], models: dict[str, Model], tmp_path: Path, cpu: Any
) -> None:
    metadata, stored, plain = as_blocks(ARCHS[name], kinds, *models[name])
    file = GgufFile(Path(write_gguf(tmp_path / "model.gguf", metadata, stored)))
    found, twin = resolved(file, gguf=file.metadata), Memory(plain)
    wanted = whole(decoder(resolved(twin, gguf=metadata), twin), IDS)
    apart = 3 if name.startswith("deepseek") else 1  # layers
    agree(decoder(found, file), wanted, plain=kinds.count("plain") * apart)
    made = native(found, file, cpu)
    agree(made, wanted, pieces=kinds[0] == "Q8_0", plain=kinds.count("plain") * apart)
    mixer = next(b.mixer for b in made.branches if isinstance(b.mixer, Mla))
    assert isinstance(mixer.k_up, HeadRows)
    assert mixer.k_up.turned == (len(kinds) == 1)
    file.close()


def test_a_whole_engine_records_its_steps_over_what_is_stored(
    models: dict[str, Model], tmp_path: Path
) -> None:
    metadata, stored, plain = as_blocks("deepseek2", ("Q8_0", "Q4_K"), *models["deepseek_v3"])
    paths = [write_gguf(tmp_path / f"{n}.gguf", metadata, t) for n, t in (("a", stored), ("b", plain))]
    options: dict[str, Any] = {"device": "cpu", "threads": 2, "kv_dtype": "float32", "precise": True}
    prompts, params = [IDS[:9].tolist(), IDS[3:20].tolist()], SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(paths[0], **options) as found, LLM(paths[1], **options, ops="reference") as wanted:
        logits = wanted.logits(prompts[1])
        assert worst(found.logits(prompts[1]), logits) <= 1e-4 * float(logits.abs().max())
        runner, bound = found._loaded.runner, found._loaded.target.bound
        assert runner.is_recorded
        assert [b.variant for b in bound if b.op == "map_heads"] == ["native-stored"] * 6
        assert large(runner.decoder) == []
        texts = [[o.outputs[0].token_ids for o in m.generate(prompts, params)] for m in (found, wanted)]
        assert texts[0] == texts[1]
        saved = sum(map(_size, plain.values())) - sum(map(_size, stored.values()))
        nbytes = [model._loaded.target.weights_nbytes for model in (found, wanted)]
        assert nbytes[1] - nbytes[0] >= 0.95 * saved  # other matrices are padded to whole tiles
    with LLM(paths[0], **options, ops="reference") as found:
        assert worst(found.logits(prompts[1]), logits) <= 1e-4 * float(logits.abs().max())
        assert large(found._loaded.runner.decoder) == []


def _size(value: Any) -> int:
    return int(value.nbytes if isinstance(value, Tensor) else value[0].nbytes)


def test_oxidizr_keeps_its_three_matrices_apart() -> None:
    k, v = random_weight("Q8_0", 3 * 16, 64), random_weight("fp8", 3 * 8, 64)
    found = _key_value(3, "uk", "uv").fn(k, v)
    assert isinstance(found, Halves)
    plain = _key_value(3, "uk", "uv").fn(k.dequantize(torch.float32), v.dequantize(torch.float32))
    assert torch.equal(found.dequantize(torch.float32), plain)


def test_rows_of_halves_in_another_order_are_those_rows(models: dict[str, Model], cpu: Any) -> None:
    config, tensors = models["deepseek_v3"]
    order = torch.arange(HEADS * (NOPE + VALUE)).flip(0)

    def halves(t: Tensor) -> Halves:
        values = random_weight("Q8_0", HEADS * VALUE, RANK)
        return Halves(random_weight("Q8_0", HEADS * NOPE, RANK), values, HEADS, False, order)

    stored = Memory(with_up_projections(tensors, halves))
    plain = numbers_of(stored)
    wanted, found = whole(decoder(resolved(plain, config), plain), IDS), resolved(stored, config)
    for made in (decoder(found, stored), native(found, stored, cpu)):
        assert worst(whole(made, IDS), wanted) <= 1e-4 * float(wanted.abs().max())


def test_halves_of_other_sizes_are_refused(models: dict[str, Model]) -> None:
    """Together they have the rows that the model wants."""
    metadata, stored, _ = as_blocks("deepseek2", ("Q8_0", "Q4_K"), *models["deepseek_v3"])
    tensors = Memory({n: t for n, t in stored.items() if isinstance(t, Tensor)})
    for n in (n for n in stored if n not in tensors):
        shape = (HEADS * RANK, VALUE) if "attn_k_b" in n else (HEADS * NOPE, RANK)
        tensors[n] = random_weight("fp8", *shape)  # type: ignore[assignment]
    with pytest.raises(
        ShapeMismatch, match=r"attn\.kv_b: the file has keys \[1024, 24\] and values \[128, 256\]"
    ):
        decoder(resolved(tensors, gguf=metadata), tensors)
