"""How a checkpoint says that it is quantized: every dialect of `quantization_config` as one kind of data.

It is in config.json, or in a file of its own beside the weights. The tensors themselves show how each is
packed (`packed`). A scheme says what they cannot show (which zero points, how large a block), and what
must agree with them. A method that is not read is refused here, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import regex

from plait.checkpoint.readers.mmap_json import read_json
from plait.errors import BadFile, UnsupportedFormat, clip_text

BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_KEYS = ("quantization_config", "compression_config")
_NESTS = ("text_config", "llm_config", "language_config", "thinker_config")
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_MAX_PATTERN = 512
_PATIENCE_S = 2.0  # for one name: expressions of a file could take for ever
_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Options:
    """What a scheme says of a module; None where it says nothing.

    bits: of an integer. group: columns that share a scale, 0 for a whole row. block: rows and columns that
    do. plus_one: the file's zero points are one too small (GPTQ's first version).
    """

    bits: int | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    plus_one: bool | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """What some modules have instead. `options` None: they are not quantized.

    names: modules, meant with all that is in them. anywhere: or parts of their names between dots. pattern:
    an expression for the start of a name, compiled by `regex`, because its matching can be given up.
    """

    options: Options | None
    names: frozenset[str] = frozenset()
    anywhere: frozenset[str] = frozenset()
    pattern: Any = None

    def speaks_of(self, words: Sequence[str]) -> bool:
        """Whether the rule is for a module; words: its name, split at dots.

        Raises BadFile for an expression that takes too long.
        """
        if self.names and not self.names.isdisjoint(_starts(words)):
            return True
        ends = (words[i:] for i in range(len(words))) if self.anywhere else ()
        if any(not self.anywhere.isdisjoint(_starts(end)) for end in ends):
            return True
        if self.pattern is None:
            return False
        try:
            return self.pattern.match(".".join(words), timeout=_PATIENCE_S) is not None
        except TimeoutError:
            shown = self.pattern.pattern[:80]
            raise BadFile(f"the quantization config's expression {shown!r} takes too long to match") from None


def _starts(words: Sequence[str]) -> Iterator[str]:
    return (".".join(words[: i + 1]) for i in range(len(words)))


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantized checkpoint in its own words. `rules`: the first that matches a module's name counts."""

    method: str
    options: Options
    rules: tuple[Rule, ...] = ()

    def of(self, module: str) -> Options | None:
        """The options of one module, like 'model.layers.0.mlp.up_proj'; None if it is not quantized."""
        words = module[:256].split(".")
        return next((rule.options for rule in self.rules if rule.speaks_of(words)), self.options)


def find_scheme(
    config: Mapping[str, object] | None, beside: Mapping[str, Path] = MappingProxyType({})
) -> Scheme | None:
    """The scheme of a checkpoint; None if no file has one.

    config: its config.json; `beside`: files beside the weights, by name, of which `BESIDE` may have it.

    Raises UnsupportedFormat for a method that is not read, BadFile for one that cannot be understood.
    """
    given = config or {}
    for nest in (given, *(given.get(name) for name in _NESTS)):
        for key in _KEYS:
            if isinstance(nest, Mapping) and nest.get(key):
                return read_scheme(nest[key], f"config.json: {key}")
    for name in BESIDE:
        if name in beside:
            return read_scheme(read_json(beside[name], "the quantization's config"), name)
    return None


def read_scheme(raw: object, where: str) -> Scheme:
    """One dialect as data. `where` names its place in messages."""
    if not isinstance(raw, Mapping):
        raise BadFile(f"{where} must be an object, got {type(raw).__name__}")
    if isinstance(raw.get("quantization"), Mapping):  # modelopt's own file
        raw = {"quant_method": "modelopt", **raw["quantization"]}
    method = _method(raw, where)
    if method not in _READERS:
        raise UnsupportedFormat(
            f"{where}: the quantization method {method!r} is not read; read are "
            f"{', '.join(sorted(_READERS))}, and GGUF files. Take the model in one of these, or unquantized"
        )
    return replace(_READERS[method](_Said(raw, where)), method=method)


def _method(raw: Mapping[str, object], where: str) -> str:
    said = raw.get("quant_method")
    if said is None:
        marks = {"w_bit": "awq", "config_groups": "compressed-tensors", "quant_algo": "modelopt"}
        marks |= dict.fromkeys(("load_in_4bit", "load_in_8bit"), "bitsandbytes")
        found = (method for key, method in marks.items() if key in raw)
        said = next(found, "gptq" if where == BESIDE[0] else "")
    word = str(said).lower().replace("_", "-")[:40]
    for method in ("auto-round", "bitsandbytes", "compressed-tensors", "modelopt"):
        if method in word or method.replace("-", "") == word:
            return method
    known = {"gptq-marlin": "gptq", "gptqmodel": "gptq", "awq-marlin": "awq", "fbgemm-fp8": "fbgemm_fp8"}
    return known.get(word, word or "(none)")


@dataclass(frozen=True, slots=True)
class _Said:
    """A dialect's words, checked as they are taken."""

    raw: Mapping[str, Any]
    where: str

    def get(self, *keys: str) -> Any:
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), None)

    def word(self, *keys: str) -> str | None:
        value = self.get(*keys)
        return None if value is None else str(value).lower()[:80]

    def number(self, *keys: str, low: int = 1, high: int = _MAX_SIZE) -> int | None:
        value = self.get(*keys)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            shown = clip_text(repr(value), 80)
            raise BadFile(f"{self.where}: {keys[0]} is {shown}; it must be from {low} to {high}")
        return value

    def bits(self, *keys: str) -> int | None:
        return self.number(*keys, low=2, high=8)

    def group(self, *keys: str) -> int | None:
        """-1 and 0 stand for a whole row: 0."""
        value = self.number(*keys, low=-1)
        return None if value is None else max(value, 0)

    def names(self, *keys: str) -> list[str]:
        value = self.get(*keys)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise BadFile(f"{self.where}: {keys[0]} must be a list of names, got {str(value)[:80]!r}")
        return value

    def inner(self, *keys: str) -> _Said:
        value = self.get(*keys)
        if value is not None and not isinstance(value, Mapping):
            raise BadFile(f"{self.where}: {keys[0]} must be an object, got {str(value)[:80]!r}")
        return _Said(value or {}, f"{self.where}.{keys[0]}")

    def only(self, key: str, value: str | None, known: Sequence[str]) -> None:
        if value is not None and value not in known:
            raise UnsupportedFormat(
                f"{self.where}: {key} {value!r} is not read; read are {', '.join(known)}. "
                "Take the model in one of these, or unquantized"
            )

    def without(self, *keys: str) -> tuple[Rule, ...]:
        """Rules for modules that are named as left out: names, parts of them, or expressions."""
        given = [name for key in keys for name in self.names(key)]
        plain = frozenset(name for name in given if not name.startswith("re:") and "*" not in name)
        rest = (self.rule(name, None) for name in given if name not in plain)
        return (Rule(None, anywhere=plain), *rest)

    def rule(self, text: str, options: Options | None) -> Rule:
        """For a module's name, a shell's pattern with *, or `re:` and an expression for the start of one."""
        if len(text) > _MAX_PATTERN:
            raise BadFile(
                f"{self.where}: {text[:80]!r}… has {len(text)} characters; {_MAX_PATTERN} are allowed"
            )
        try:
            if text.startswith("re:"):
                return Rule(options, pattern=regex.compile(text[3:]))
            if "*" in text:
                expression = ".*".join(map(regex.escape, text.split("*"))) + r"(\..*)?$"
                return Rule(options, pattern=regex.compile(expression))
            return Rule(options, names=frozenset((text,)))
        except (regex.error, RecursionError, OverflowError) as error:
            raise BadFile(f"{self.where}: {text[:80]!r} is not a regular expression: {error}") from error


def _gptq(said: _Said) -> Scheme:
    kind = said.word("checkpoint_format", "format")
    said.only("checkpoint_format", kind, ("gptq", "gptq_v2"))
    if said.get("is_marlin_format"):
        raise UnsupportedFormat(f"{said.where}: weights repacked for Marlin's kernels are not read")
    usual = Options(said.bits("bits"), said.group("group_size"), plus_one=kind != "gptq_v2")
    return Scheme("gptq", usual, _dynamic(said, usual))


def _dynamic(said: _Said, usual: Options) -> tuple[Rule, ...]:
    """GPTQModel's overrides: an expression, with -: for modules left out, and what is different."""
    rules = []
    for key, value in said.inner("dynamic").raw.items():
        if key.startswith("-:"):
            rules.append(said.rule(f"re:{key[2:]}", None))
            continue
        one = said.inner("dynamic").inner(key)
        bits, group = one.bits("bits") if value else None, one.group("group_size") if value else None
        options = replace(usual, bits=bits or usual.bits, group=usual.group if group is None else group)
        rules.append(said.rule(f"re:{key.removeprefix('+:')}", options))
    return tuple(rules)


def _awq(said: _Said) -> Scheme:
    said.only("version", said.word("version"), ("gemm", "ipex", "exllama"))
    said.only("backend", said.word("backend"), ("autoawq", "auto", "gemm"))
    usual = Options(said.bits("bits", "w_bit"), said.group("group_size", "q_group_size"))
    return Scheme("awq", usual, said.without("modules_to_not_convert"))


def _auto_round(said: _Said) -> Scheme:
    """AutoRound writes the layouts of others; its own is GPTQ's with zero points as they are."""
    packing = said.word("packing_format") or "auto_round"
    known = [f"auto_round:{name}" for name in ("auto_gptq", "gptq", "gptqmodel", "auto_awq", "awq", "fp8")]
    said.only("packing_format", packing, ["auto_round", *known, "auto_round:llm_compressor"])
    plus_one = packing in ("auto_round:auto_gptq", "auto_round:gptq")
    usual = Options(said.number("bits", high=16), said.group("group_size"), plus_one=plus_one)
    rules = []
    for name in said.inner("extra_config").raw:
        one = said.inner("extra_config").inner(name)
        bits, group = one.number("bits", high=32), one.group("group_size")
        options = replace(usual, bits=bits or usual.bits, group=usual.group if group is None else group)
        expression = f"re:{name}" if ".*" in name else name
        rules.append(said.rule(expression, None if bits and bits > 8 else options))
    return Scheme("auto-round", usual, tuple(rules))


def _fp8(said: _Said) -> Scheme:
    said.only("fmt", said.word("fmt"), ("e4m3", "e4m3fn", "float8_e4m3fn"))
    left_out = said.without("modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", Options(block=_block(said, "weight_block_size")), left_out)


def _block(said: _Said, key: str) -> tuple[int, int] | None:
    value = said.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise BadFile(f"{said.where}: {key} must be two sizes, got {str(value)[:80]!r}")
    return value[0], value[1]


def _modelopt(said: _Said) -> Scheme:
    algorithm = said.word("quant_algo", "quant_method") or ""
    if not algorithm.startswith("modelopt"):
        said.only("quant_algo", algorithm, ("fp8", "nvfp4", "mixed_precision"))
    return Scheme("modelopt", Options(), said.without("exclude_modules", "ignore"))


def _bitsandbytes(said: _Said) -> Scheme:
    return Scheme("bitsandbytes", Options(), said.without("llm_int8_skip_modules"))


def _plain(said: _Said) -> Scheme:
    return Scheme("", Options(), said.without("modules_to_not_convert", "ignored_layers"))


def _read_compressed(said: _Said) -> Scheme:
    said.only("format", said.word("format"), _FORMATS)
    sparsity = said.inner("sparsity_config")
    sparsity.only("format", sparsity.word("format"), ("dense",))
    if said.inner("transform_config").get("config_groups"):
        raise UnsupportedFormat(
            f"{said.where}: transforms of activations (transform_config) are not computed"
        )
    rules: list[Rule] = list(said.without("ignore"))
    groups = said.inner("config_groups")
    for name in groups.raw:
        group = groups.inner(name)
        group.only("format", group.word("format"), _FORMATS)
        options = _weights(group.inner("weights"))
        rules += [group.rule(target, options) for target in group.names("targets") if "." in target]
        if any("." not in target for target in group.names("targets")):  # a class of modules: all of them
            rules.append(Rule(options, pattern=regex.compile("")))
    return Scheme("compressed-tensors", Options(), tuple(rules))


def _weights(said: _Said) -> Options:
    group = said.group("group_size") if said.word("strategy") in ("group", "tensor_group", None) else 0
    bits = said.bits("num_bits") if said.word("type") in ("int", None) else None
    return Options(bits, group, _block(said, "block_structure"))


_READERS: Mapping[str, Callable[[_Said], Scheme]] = MappingProxyType(
    {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "fp8": _fp8,
        "fbgemm_fp8": _plain,
        "mxfp4": _plain,
        "modelopt": _modelopt,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _read_compressed,
    }
)
