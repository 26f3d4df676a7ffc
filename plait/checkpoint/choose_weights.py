"""Which files of a folder are the weights of its model, by their names. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.checkpoint.readers.gguf_parts import part_paths
from plait.checkpoint.readers.mmap_json import read_json
from plait.errors import ConfigError, UnsupportedFormat, list_some

PARAMS, CONSOLIDATED = "params.json", "consolidated"  # of Mistral's own files
INDEX = ".safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
MTP_FILE = "mtp.safetensors"  # a head for drafts that was trained later, next to its model
_STEP = re.compile(r"(?P<prefix>.*)_step_(?P<step>\d{1,18})\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
PICKLE_ADVICE = (
    "Plait does not read pickle files, because loading one runs whatever code is in it. Convert it once, "
    "where you trust it: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)


def choose_weights(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Which of a directory's files are the weights: one file, all shards, or all parts.

    In this order: model.safetensors, with mtp.safetensors where there is one; shards; *_final; the last
    *_step_N; consolidated or the only safetensors file; the only GGUF model. Raises ConfigError when there
    are several to choose from, or none.
    """
    tensors = sorted(n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_"))
    for single in ("model.safetensors", "pytorch_model.safetensors"):
        if single in tensors:
            return (single, *(n for n in tensors if n == MTP_FILE))
    shards = [n for n in tensors if SHARD.fullmatch(n)]
    # Next to the shards of transformers Mistral has its own, which are the same model.
    shards = [n for n in shards if not n.startswith(CONSOLIDATED)] or shards
    if shards:
        stems = {SHARD.sub(r"\g<stem>-of-\g<count>", n) for n in shards}
        return tuple(only_one(sorted(stems), shards, where))
    if found := [n for n in tensors if n.endswith("_final.safetensors")]:
        return tuple(only_one(found, found, where))
    if steps := [n for n in tensors if _STEP.fullmatch(n)]:
        last = max(_step(n) for n in steps)
        newest = [n for n in steps if _step(n) == last]
        return tuple(only_one(newest, newest, where))
    if "consolidated.safetensors" in tensors:
        return ("consolidated.safetensors",)
    if tensors:
        return tuple(only_one(tensors, tensors, where))
    ggufs = sorted(n for n in names if n.endswith(".gguf") and not n.startswith("mmproj"))
    if ggufs:
        models = sorted({part_paths(Path(n))[0].name for n in ggufs})
        only_one(models, models, where)
        return tuple(part.name for part in part_paths(Path(models[0])))
    raise _nothing(names, where)


def list_indexes(names: Sequence[str]) -> list[str]:
    """The indexes of shards; not Mistral's own next to that of transformers."""
    found = [n for n in names if n.endswith(INDEX)]
    return [n for n in found if not n.startswith(CONSOLIDATED)] or found


def is_mistral_own(weights: str, side_files: Mapping[str, Path]) -> bool:
    """Whether weights have the names of Mistral's own files, and params.json is of a transformer of theirs.

    Codestral Mamba has such files, too, and a config.json that says all. Raises BadFile.
    """
    if PARAMS not in side_files or not weights.startswith(CONSOLIDATED):
        return False
    params = read_json(side_files[PARAMS], PARAMS)
    return "dim" in params and "n_heads" in params


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    return int(match["step"]) if match else -1


def only_one(choices: Sequence[str], result: Sequence[str], where: str) -> Sequence[str]:
    """`result` if there is one choice. Raises ConfigError listing them otherwise."""
    if len(choices) == 1:
        return result
    raise ConfigError(f"{where} holds several models; name one: {list_some(choices, 12)}")


def _nothing(names: Sequence[str], where: str) -> ConfigError | UnsupportedFormat:
    if pickles := [n for n in names if n.endswith(PICKLES)]:
        return UnsupportedFormat(f"{where} has only {', '.join(sorted(pickles)[:4])}. {PICKLE_ADVICE}")
    if any(n.startswith("adapter_") for n in names):
        return UnsupportedFormat(f"{where} is an adapter, not a model; merge it into its base model first")
    shown = ", ".join(sorted(names)[:8]) or "nothing"
    return ConfigError(f"{where} has no *.safetensors and no *.gguf file; it holds {shown}")
