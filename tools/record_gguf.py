"""Record how llama.cpp's converter writes the tiny checkpoints of the tests, and compare our logits.

python tools/record_gguf.py LLAMA_CPP [VARIANT ...]

LLAMA_CPP is a source tree of llama.cpp with `conversion/` and `gguf-py/`. Each checkpoint is written with
random numbers, converted without a vocabulary, loaded by Plait, and the logits must be those of transformers.
`tests/families/gguf/llama_cpp.json` gets what was made of these variants; without any it is written anew.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5
STACKED = r"(\.experts|\.norms|_projections)\.\d+\."  # what converters stack
VOCABULARY = {"added_tokens": [], "model": {"type": "BPE", "merges": [], "vocab": {}}}


def convert(folder: Path, out: Path) -> None:
    """Write the GGUF file of a folder, in float32 and without tokens."""
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from gguf import LlamaFileType, TensorNameMap

    from tests.families.gguf.recorded import order_in_turn

    found = json.loads((folder / "config.json").read_text())
    size = found.get("text_config", found)["vocab_size"]
    vocabulary = {**VOCABULARY["model"], "vocab": {str(i): i for i in range(size)}}
    (folder / "tokenizer.json").write_text(json.dumps({**VOCABULARY, "model": vocabulary}))
    kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))

    def modify(self: Any, *given: Any) -> Iterator[Any]:
        """Also what a converter returns, where it should yield it (StableLM's norms of heads)."""
        left = yield from kind.modify_tensors(self, *given)
        yield from left or ()

    own = {
        "set_vocab": lambda self: self.gguf_writer.add_tokenizer_model("none"),
        "model_arch": kind.model_arch,
        "modify_tensors": modify,
    }
    if (
        kind.__name__ == "BitnetModel"
    ):  # rounds weights to three values, which a model of those leaves as it is
        own["weight_quant"] = lambda self, weight: weight
    if kind.__name__ == "DeepseekV4Model":  # writes experts in MXFP4 alone
        own["generate_extra_tensors"] = _write_experts
    if kind.__name__ == "PlamoModel":  # made for the sizes of the one that was published
        heads, shared = found["num_attention_heads"], found["n_shared_head"]
        own["shuffle_attn_q_weight"] = lambda self, w: order_in_turn(found, w)
        own["shuffle_attn_output_weight"] = lambda self, w: order_in_turn(found, w.T).T
        own["set_gguf_parameters"] = lambda self: (
            kind.set_gguf_parameters(self),
            self.gguf_writer.kv_data[-1].pop("plamo.attention.head_count_kv", None),
            self.gguf_writer.add_head_count_kv(heads // shared),
        )
    if kind.__name__ == "BaichuanModel":  # calls itself for all but the joined tensor
        own["modify_tensors"] = lambda self, w, name, i: (
            kind.modify_tensors(self, w, name, i)
            if "W_pack" in name
            else ModelBase.modify_tensors(self, w, name, i)
        )
    usual = dict(TensorNameMap.block_mappings_cfg)  # of all architectures: Arctic's map changes it
    made = type(kind.__name__, (kind,), own)(folder, LlamaFileType.ALL_F32, out, eager=True)
    if hasattr(made, "impl"):  # Mistral's converter is one of two others
        made.impl.set_vocab = lambda: made.impl.gguf_writer.add_tokenizer_model("none")
    made.write()
    TensorNameMap.block_mappings_cfg = usual


def _write_experts(made: Any) -> tuple[()]:
    """DeepSeek-V4's experts and tables, in float32."""
    from gguf import MODEL_TENSOR

    used = made._write_hash_routing_tensors()
    for i in range(made.block_count):
        for word, key in (("1", "GATE"), ("2", "DOWN"), ("3", "UP")):
            at = f"layers.{i}.ffn.experts."
            names = sorted(
                name for name in made.model_tensors if name.startswith(at) and f".w{word}." in name
            )
            stack = torch.stack([made.model_tensors[name]() for name in names])
            target = made.format_tensor_name(getattr(MODEL_TENSOR, f"FFN_{key}_EXP"), i)
            made.gguf_writer.add_tensor(target, stack.numpy())
            used += names
    for name in used:
        del made.model_tensors[name]
    return ()


def record(name: str, folder: Path) -> dict[str, Any]:
    """What the converter made of a variant. Raises SystemExit where Plait's logits differ."""
    from plait.checkpoint.readers.gguf import GgufFile
    from tests.families import tiny
    from tests.families.gguf.published import as_published
    from tests.families.gguf.recorded import read_checkpoint
    from tests.families.parity import Memory, decoder, resolved, whole, worst

    config, tensors, oracle = read_checkpoint(name, folder)
    there = folder / "published"
    there.mkdir(parents=True)
    theirs, stored = as_published(name, dict(config), tensors)
    (there / "config.json").write_text(json.dumps(theirs))
    tiny.rewrite(stored, there / "model.safetensors")
    convert(there, folder / "model.gguf")
    file = GgufFile(folder / "model.gguf")
    difference = worst(
        whole(decoder(resolved(file, gguf=file.metadata), file), oracle["ids"][0]), oracle["logits"][0]
    )
    arch = file.metadata["general.architecture"]
    print(f"{name}: {arch}, the logits differ by {difference:.1e}", end="", flush=True)
    if difference > TOLERANCE:  # sums of large numbers: the checkpoint itself must differ as much
        own = Memory(tensors)
        usual = worst(whole(decoder(resolved(own, config), own), oracle["ids"][0]), oracle["logits"][0])
        print(f", those of the checkpoint itself by {usual:.1e}", end="")
        if difference > 2 * usual or difference > 1e-4:
            raise SystemExit(f"{name}: {TOLERANCE} is allowed")
    print(flush=True)
    metadata = {
        key: file.metadata[key] for key in file.metadata if not key.startswith(("tokenizer.", "GGUF."))
    }
    entries, numbers = {}, {}
    for theirs in file.names():
        if (found := find_source(config, tensors, file.read(theirs))) is None:
            numbers[theirs] = file.read(theirs).tolist()
        else:
            entries[theirs] = (*found, list(file.shape(theirs)))
    return {"metadata": metadata, "tensors": fold_layers(entries), "numbers": numbers}


def find_source(config: Mapping[str, Any], tensors: Mapping[str, Any], made: Any) -> tuple[str, str] | None:
    """(way, name) of the tensor, or stack of tensors, of which this one was made; None: of none of them."""
    from tests.families.gguf.recorded import WAYS, _gather

    numbered = {re.sub(STACKED, r"\1.{e}.", name): None for name in tensors}
    numbered |= {re.sub(r"\.q_proj\.", r".{qkv}_proj.", name): None for name in tensors}
    for way, make in WAYS.items():
        for source in numbered:
            try:
                found = make(config, _gather(tensors, source))
            except (RuntimeError, KeyError, IndexError):
                continue
            if found.numel() == made.numel() and bool((found.flatten() == made.flatten()).all()):
                return way, source
    return None


def fold_layers(entries: Mapping[str, tuple[str, str, list[int]]]) -> dict[str, list[Any]]:
    """Tensors of several layers that were made alike, as one entry with the numbers of the layers."""
    folded: dict[str, list[Any]] = {}
    for theirs, (way, source, shape) in entries.items():
        layer = re.match(r"blk\.(\d+)\.", theirs)
        key, own = theirs, source
        if layer and f".{layer[1]}." in source:
            key, own = (
                theirs.replace(f"blk.{layer[1]}.", "blk.{i}."),
                source.replace(f".{layer[1]}.", ".{i}.", 1),
            )
        entry = folded.get(key)
        if layer and key != theirs and (entry is None or entry[:3] == [way, own, shape]):
            folded.setdefault(key, [way, own, shape, []])[3].append(int(layer[1]))
        else:
            folded[theirs] = [way, source, shape, []]
    return folded


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    llama_cpp, wanted = Path(sys.argv[1]), sys.argv[2:]
    sys.path[:1] = [str(ROOT), str(llama_cpp / "gguf-py"), str(llama_cpp)]
    logging.disable(logging.CRITICAL)
    from tests.families.gguf.recorded import NAMES, RECORDED

    found = json.loads(RECORDED.read_text(encoding="utf-8")) if wanted else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted or NAMES:
            found[name] = record(name, Path(folder) / name)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in NAMES if name in found)
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
