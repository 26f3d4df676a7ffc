"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors (Hugging Face PEFT 0.19)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from plait.checkpoint.adapters.adapter_file import AdapterFile, FactorPair, HalfPairs, digest_pairs
from plait.checkpoint.find_files import read_json
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import BadFile, MissingTensor, ShapeMismatch, UnsupportedFormat, clip_text, list_some

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_OTHERS = (  # what tensors of other kinds are called, and what they are
    ("lora_embedding_", "embeddings with an adapter"),
    ("lora_magnitude_vector", "DoRA"),
    ("modules_to_save", "modules_to_save"),
    ("token_adapter", "trained token embeddings"),
    (".bias", "trained biases"),
    ("embed_tokens.weight", "trained embeddings"),
    ("lm_head.weight", "a trained head"),
)
# Keys of the config that change the arithmetic or the base model, and the values that mean "not used".
_REFUSED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "use_dora": ("DoRA", (False, None)),
    "bias": ("trained biases", ("none", None)),
    "lora_bias": ("biases of lora_B", (False, None)),
    "modules_to_save": ("modules that were trained as a whole", ([], None)),
    "trainable_token_indices": ("trained token embeddings", ([], {}, None)),
    "layer_replication": ("layers that are used several times", ([], None)),
    "target_parameters": ("adapters of parameters without a module", ([], None)),
    "use_qalora": ("QALoRA", (False, None)),
    "alora_invocation_tokens": ("adapters that begin at an invocation", ([], None)),
    "arrow_config": ("Arrow routing", (None,)),
    "use_bdlora": ("BD-LoRA", (False, None)),
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base model, too
_MOST_PATTERNS, _MOST_PATTERN_CHARS = 4096, 256
_QUANTIFIERS = re.compile(r"[*+?{]")


def open_peft(folder: Path, max_rank: int) -> AdapterFile:
    """An adapter of PEFT. Raises BadFile, UnsupportedFormat, MissingTensor and ShapeMismatch."""
    config_path, weights = folder / CONFIG, folder / WEIGHTS
    if not weights.is_file():
        hint = "adapter_model.bin is a pickle file, which is never read; save it as safetensors"
        why = hint if (folder / "adapter_model.bin").exists() else f"{WEIGHTS} is not there"
        raise MissingTensor(f"{folder}: {why}")
    config = read_json(config_path, CONFIG)
    _check_config(config_path, config)
    rank_of, alpha_of = _rank_rule(config_path, config, max_rank), _alpha_rule(config_path, config)
    pairs, files = HalfPairs(weights), SafetensorsFiles(weights)
    for name in files.names():
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnsupportedFormat(f"{weights}: tensor {clip_text(name, 120)!r} is {_say_kind(name)}")
        size = min(files.shape(name)) if files.shape(name) else 0
        if size > max_rank:  # before it is read
            raise ShapeMismatch(
                f"{weights}: {name!r} has rank {size}; the limit is {max_rank} (--max-lora-rank)"
            )
        pairs.put(f"{found['module']}.weight", "A" if found["which"] == "A" else "B", name, files.read(name))
    done: dict[str, FactorPair] = {}
    for weight, down, up in pairs:
        module = weight.removesuffix(".weight")
        rank = rank_of(module)
        if down.shape[-2] != rank or down.ndim != 2:
            raise ShapeMismatch(
                f"{weights}: {module}: lora_A is {list(down.shape)}, and its rank is {rank} in {CONFIG}"
            )
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        done[weight] = FactorPair(down, up, alpha_of(module) / root)
    turned = bool(config.get("fan_in_fan_out"))
    return AdapterFile(folder, "hf", done, digest_pairs(done), turned)


def _check_config(path: Path, config: Mapping[str, object]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedFormat(f"{path}: peft_type is {kind!r}; only LORA is read")
    for key, (what, unused) in _REFUSED.items():
        if key in config and config[key] not in unused:
            raise UnsupportedFormat(
                f"{path}: {key} is {clip_text(repr(config[key]), 60)}: {what} cannot be served; merge the "
                "adapter with PEFT and serve the merged model"
            )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise UnsupportedFormat(
            f"{path}: init_lora_weights is {clip_text(repr(start), 60)}, which changes the base model, too; "
            "convert the adapter to a plain one with PEFT first"
        )


def _rank_rule(path: Path, config: Mapping[str, object], max_rank: int) -> Callable[[str], int]:
    default = _rank(path, "r", config.get("r"), max_rank)
    patterns = _patterns(path, "rank_pattern", config.get("rank_pattern"))
    ranks = {key: _rank(path, f"rank_pattern[{key!r}]", value, max_rank) for key, value in patterns.items()}
    return lambda module: next((rank for key, rank in ranks.items() if _fits(key, module)), default)


def _alpha_rule(path: Path, config: Mapping[str, object]) -> Callable[[str], float]:
    default = _alpha(path, "lora_alpha", config.get("lora_alpha"))
    patterns = _patterns(path, "alpha_pattern", config.get("alpha_pattern"))
    alphas = {key: _alpha(path, f"alpha_pattern[{key!r}]", value) for key, value in patterns.items()}
    return lambda module: next((alpha for key, alpha in alphas.items() if _fits(key, module)), default)


def _rank(path: Path, name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not value >= 1:
        raise BadFile(f"{path}: {name} is {clip_text(repr(value), 60)}; a rank is a whole number from 1 on")
    if value > most:
        raise ShapeMismatch(f"{path}: {name} is {value}; the limit is {most} (--max-lora-rank)")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(float(value)) < 1e6:  # type: ignore[arg-type]
        raise BadFile(f"{path}: {name} is {clip_text(repr(value), 60)}; it must be a number below 1e6")
    return float(value)  # type: ignore[arg-type]


def _patterns(path: Path, name: str, value: object) -> Mapping[str, object]:
    """Checked so that no pattern of a file can keep the engine busy: two quantifiers, none behind a group."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
        raise BadFile(f"{path}: {name} is not an object of at most {_MOST_PATTERNS} patterns")
    for key in value:
        is_slow = len(_QUANTIFIERS.findall(key)) > 2 or re.search(r"\)[*+?{]", key)
        if is_slow or len(key) > _MOST_PATTERN_CHARS:
            raise UnsupportedFormat(
                f"{path}: {name}: the pattern {clip_text(key, 60)!r} has more than two quantifiers, one "
                f"behind a group, or more than {_MOST_PATTERN_CHARS} characters; write the names of modules"
            )
        try:
            re.compile(key)
        except re.error as error:
            raise BadFile(f"{path}: {name}: {clip_text(key, 60)!r} is no pattern: {error}") from error
    return value


def _fits(pattern: str, module: str) -> bool:
    """As PEFT: the pattern is all of the module's path, or what follows one of its dots."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


def _say_kind(name: str) -> str:
    if ".base_layer." in name:  # PEFT adds it where the head or the embedding has an adapter
        return (
            "a weight of the base model, which PEFT has saved with the adapter; save it without: "
            "save_pretrained(FOLDER, save_embedding_layers=False)"
        )
    known = next((what for part, what in _OTHERS if part in name), None)
    if known:
        return f"of {known}, which cannot be served; merge the adapter with PEFT and serve the merged model"
    return (
        f"no factor of a LoRA adapter; expected is MODULE.{list_some(('lora_A.weight', 'lora_B.weight'), 2)}"
    )
