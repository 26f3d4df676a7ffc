"""What a user may point at (a directory, a file, a name on the Hub), and which files are the model."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from plait.checkpoint.choose_weights import (
    INDEX,
    PARAMS,
    PICKLE_ADVICE,
    PICKLE_STARTS,
    PICKLES,
    SHARD,
    choose_weights,
    is_mistral_own,
    list_indexes,
    only_one,
)
from plait.checkpoint.hub.client import (
    HubName,
    Listing,
    ask,
    cached_folder,
    cached_names,
    is_file_address,
    is_hub_name,
    library,
    name_files,
    parse_hub_name,
    quantizations,
    repo_folder,
)
from plait.checkpoint.readers.gguf_parts import part_paths
from plait.checkpoint.readers.mmap_json import (
    POINTER,
    check_stamp,
    read_json,
    read_stamp,
    read_start,
    refuse_pointers,
)
from plait.errors import (
    BadFile,
    CheckpointError,
    ConfigError,
    PlaitError,
    UnsupportedFormat,
    check_unicode,
    list_some,
)

__all__ = ["Fetch", "ModelFiles", "fetch_model", "find_model", "plan_fetch", "read_json"]

log = logging.getLogger("plait")

_SIDE_NAMES = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"}) | {
    *("tokenizer.jsonl", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("generation_config.json", "chat_template.jinja", "chat_template.json", "rwkv_vocab_v20230424.txt"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", PARAMS),
}
MODULE_FOLDER = re.compile(r"\d_(Pooling|Dense|Normalize|LogitScore)")  # of sentence-transformers
MODULE_FILES = ("config.json", "model.safetensors")  # in such a folder


class ModelFiles(Struct, frozen=True):
    """The files of one model.

    `weights`: one file, or all shards or parts in order. `config`: the config.json of a safetensors model, or
    the params.json of Mistral's own; a GGUF file has its config in its metadata. `index`: tensor name -> file
    name, if the shards have an index.
    `side_files`: tokenizer and template files beside the weights, by name. `name`: what to call the model.
    `stamps`: of `weights`, from before they were opened, see `read_stamp`.
    """

    kind: Literal["safetensors", "gguf"]
    weights: tuple[Path, ...]
    directory: Path
    config: Path | None
    side_files: Mapping[str, Path]
    name: str
    index: Mapping[str, str] | None = None
    stamps: tuple[tuple[int, int], ...] = ()

    def check_unchanged(self) -> None:
        """Raises BadFile if weights were replaced or written to since they were found."""
        for path, stamp in zip(self.weights, self.stamps, strict=False):
            check_stamp(path, stamp)


class Fetch(Struct, frozen=True):
    """What a Hub name means at one commit: the files it needs, and which of them are not on this disk.

    `sizes`: of every file, None where the Hub does not say. `folder`: where they are, or will be.
    """

    name: HubName
    commit: str
    side: tuple[str, ...]
    weights: tuple[str, ...]
    sizes: Mapping[str, int | None]
    folder: Path

    @property
    def missing(self) -> list[str]:
        return [n for n in (*self.side, *self.weights) if not (self.folder / n).is_file()]


def find_model(path_or_id: str | Path, *, offline: bool = False) -> ModelFiles:
    """The files of a model: of a directory, a weight file, a Hub name, or a web address.

    A Hub name is org/name, with @revision, and :Q4_K_M or /file.gguf to choose. An address is that of a model
    on the Hub, or of a GGUF file anywhere. `offline`: only what is on this disk.

    Raises ConfigError when nothing is there, the choice is not clear or a path is not UTF-8, BadFile for
    unreadable files, UnsupportedFormat for pickle files, CheckpointError when the Hub does not answer.
    """
    found = _find_model(str(path_or_id), offline)
    check_unicode("the model's path", [str(path.absolute()) for path in found.weights])
    return found


def _find_model(text: str, offline: bool) -> ModelFiles:
    if not text or "\0" in text:
        raise ConfigError("the model is an empty name; pass a directory, a file, or org/name")
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _in_directory(path)
        if path.exists() or path.is_symlink():
            return _of_file(path)
    except OSError as error:
        raise BadFile(f"{text}: cannot be opened: {error.strerror}") from error
    if is_file_address(text) and not is_hub_name(text):
        from plait.checkpoint.hub.fetch import fetch_file  # with its clients: not for files on this disk

        return _of_file(fetch_file(text, offline=offline))
    check_unicode("the model", text)
    if is_hub_name(text) and not path.parent.exists():
        return _on_hub(parse_hub_name(text), offline)
    raise ConfigError(_missing(path))


def plan_fetch(name: HubName, listing: Listing) -> Fetch:
    """What a Hub name needs of what the Hub has; only an index of shards is fetched for it.

    Raises ConfigError when the choice is not clear, CheckpointError when an index cannot be fetched.
    """
    from plait.checkpoint.hub.fetch import fetch

    names, where = list(listing.sizes), f"{name.repo} on the Hub"
    folder = repo_folder(name) / "snapshots" / listing.commit
    if name.file or name.quant:
        weights = name_files(name, names)
    else:
        root = [n for n in names if "/" not in n]
        indexes = list_indexes(root)
        if indexes and "model.safetensors" not in root:
            index = only_one(indexes, indexes, where)[0]
            weights = sorted({*_index_map(fetch(name, listing, [index], []) / index).values()})
        else:
            weights = list(_choose_on_hub(root, names, where))
    if absent := sorted(set(weights) - set(names)):
        raise BadFile(f"{where}: the index names {absent[0]!r}, which is not there")
    side = [n for n in names if _is_side(n)] if weights[0].endswith(".safetensors") else []
    sizes = {n: listing.sizes[n] for n in (*side, *weights)}
    return Fetch(name, listing.commit, tuple(side), tuple(weights), sizes, folder)


def fetch_model(plan: Fetch) -> ModelFiles:
    """Fetch what is missing, and find the model in it. Raises CheckpointError."""
    from plait.checkpoint.hub.fetch import fetch

    folder = fetch(plan.name, Listing(plan.commit, plan.sizes), plan.side, plan.weights)
    return _in_snapshot(plan.name, folder)


def _on_hub(name: HubName, offline: bool) -> ModelFiles:
    library(str(name))
    folder = cached_folder(name)
    if folder is not None and name.is_pinned:
        try:
            return _in_snapshot(name, folder)
        except PlaitError:
            log.info("%s on this disk is not whole: asking the Hub for the rest", name)
    if offline:
        if folder is None:
            raise CheckpointError(
                f"{name} is not on this disk, and with --offline the Hub is not queried; "
                f"`plait list` shows what is here, `plait pull {name}` fetches it"
            )
        return _in_snapshot(name, folder)
    try:
        listing = ask(name)
    except CheckpointError as error:
        if folder is None:
            raise CheckpointError(f"{error}; and this disk has no copy of it") from error
        log.warning("%s; the copy on this disk is used", error)
        return _in_snapshot(name, folder)
    return fetch_model(plan_fetch(name, listing))


def _in_snapshot(name: HubName, folder: Path) -> ModelFiles:
    """The model in a fetched revision. Weights arrive last, so a revision that has them is whole."""
    if name.file or name.quant:
        return _of_file(folder / name_files(name, list(cached_names(folder)))[0], str(name))
    try:
        return _in_directory(folder, str(name))
    except BadFile as error:
        raise BadFile(f"{error}; `plait pull {name}` fetches what is missing") from error


def _choose_on_hub(root: Sequence[str], names: Sequence[str], where: str) -> Sequence[str]:
    """Weights among files of a repository; several GGUF models are named by how they are quantized."""
    found = quantizations(names)
    if len(found) > 1 and not any(n.endswith(".safetensors") for n in root):
        first = ", ".join(list(found)[:16])
        repo = where.split()[0]
        files = ", ".join([n for models in found.values() for n in models][:12])
        raise ConfigError(
            f"{where} holds several models; name one, like {repo}:{next(iter(found))}; "
            f"it has {first} ({files})"
        )
    return choose_weights(root or names, where)


def _is_side(name: str) -> bool:
    """Small files that a model of safetensors is read with: config, tokenizer, templates, an index."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja")
    folder, _, last = name.partition("/")
    if MODULE_FOLDER.fullmatch(folder):
        return last in MODULE_FILES
    beside = name in _SIDE_NAMES or name == "config.json" or name.endswith((".tiktoken", INDEX))
    return beside and "/" not in name


def _in_directory(directory: Path, name: str | None = None) -> ModelFiles:
    names = sorted(entry.name for entry in directory.iterdir())
    indexes = list_indexes(names)
    display = name or directory.resolve().name
    if indexes and "model.safetensors" not in names:
        return _find_shards(directory / only_one(indexes, indexes, str(directory))[0], display)
    chosen = choose_weights(names, str(directory))
    kind: Literal["safetensors", "gguf"] = "gguf" if chosen[0].endswith(".gguf") else "safetensors"
    return _make_files(kind, [directory / n for n in chosen], display)


def _of_file(path: Path, name: str | None = None) -> ModelFiles:
    """The model in one file, by its content; its name decides only when the content says nothing."""
    start = read_start(path, 16)
    if start.startswith(b"GGUF"):
        match = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.gguf", path.name)
        return _make_files("gguf", part_paths(path), name or (match[1] if match else path.name), alone=True)
    if _is_safetensors(start, path):
        index = path.with_name(f"{match['stem']}{INDEX}") if (match := SHARD.fullmatch(path.name)) else None
        display = name or (path.resolve().parent.name if path.stem == "model" or match else path.stem)
        if index is not None and index.is_file():
            return _find_shards(index, display)
        return _make_files("safetensors", [path] if match is None else _shards(path), display)
    if start.startswith(PICKLE_STARTS) or path.suffix in PICKLES:
        raise UnsupportedFormat(f"{path}: {PICKLE_ADVICE}")
    refuse_pointers([path])
    if not start:
        raise BadFile(f"{path}: is empty; was its download or its copy interrupted?")
    raise UnsupportedFormat(
        f"{path}: is neither safetensors nor GGUF (it starts with {start!r}); pass the directory or the "
        "weight file of a model"
    )


def _is_safetensors(start: bytes, path: Path) -> bool:
    """A length, then a JSON object; a damaged file with the right suffix is for the reader to refuse."""
    if path.suffix == ".safetensors" and not start.startswith((POINTER, *PICKLE_STARTS)):
        return True
    return start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") <= path.stat().st_size


def _find_shards(index: Path, name: str) -> ModelFiles:
    """All shards that an index names, in order of name."""
    weight_map = _index_map(index)
    paths = [index.with_name(file) for file in sorted(set(weight_map.values()))]
    return _make_files("safetensors", paths, name, index=weight_map)


def _index_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index of shards. Raises BadFile."""
    weight_map = read_json(index, "the index of the shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(f"{index}: must have a weight_map, an object from tensor names to file names")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            what = f"{file!r}"[:200]
            raise BadFile(
                f"{index}: names {what} as the file of tensor {tensor[:80]!r}; it must be a *.safetensors "
                "file in the same directory"
            )
    return weight_map


def _shards(path: Path) -> list[Path]:
    """All shards of the set that one belongs to, by their names alone."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{n:05}-of-{count:05}.safetensors") for n in range(1, count + 1)]


def _make_files(
    kind: Literal["safetensors", "gguf"],
    weights: Sequence[Path],
    name: str,
    index: Mapping[str, str] | None = None,
    alone: bool = False,
) -> ModelFiles:
    """Weights with their config and side files; none of them if `alone`.

    alone: the user named one GGUF file, so the files next to it may belong to another model.
    """
    if kind == "safetensors" and index is None:
        weights = [*dict.fromkeys((*_shards(weights[0]), *weights[1:]))]
    directory = weights[0].parent
    if missing := [path.name for path in weights if not path.exists()]:
        shown = list_some(missing, 8)
        raise BadFile(f"{directory}: {len(missing)} file(s) of the model are missing: {shown}")
    beside = [] if alone else sorted(directory.iterdir())
    side_files = {p.name: p for p in beside if p.name in _SIDE_NAMES or p.suffix == ".tiktoken"}
    refuse_pointers((*weights, *side_files.values()))
    config = directory / "config.json"
    if kind == "safetensors" and is_mistral_own(weights[0].name, side_files):
        config = side_files[PARAMS]
    return ModelFiles(
        kind,
        tuple(weights),
        directory,
        config if kind == "safetensors" and config.exists() else None,
        MappingProxyType(side_files),
        name,
        MappingProxyType(dict(index)) if index is not None else None,
        tuple(map(read_stamp, weights)),
    )


def _missing(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"{path}: no such file or directory; {parent} does not exist either"
    near = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], 3, 0.5)
    hint = f" (nearest: {', '.join(str(parent / n) for n in near)})" if near else ""
    return f"{path}: no such file or directory{hint}; pass a directory, a weight file, or a Hub name org/name"
