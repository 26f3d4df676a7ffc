"""GGUF architectures by name: each family says how its metadata reads, in the family's own file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.checkpoint.names import Rules
from plait.errors import UnsupportedModel
from plait.families.config.normalize import FULL, NOTHING, SLIDING, Config, IncompleteConfig

Shapes = Mapping[str, tuple[int, ...]]
Values = Mapping[str, Any]
FILE = "GGUF metadata"


class ArchKeys(Values):
    """The keys behind an architecture's prefix. `read`: those that were looked up.

    Asking for what is not there raises IncompleteConfig, which names the key.
    """

    def __init__(self, arch: str, found: Values) -> None:
        self._arch, self._found, self.read = arch, found, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self._found:
            raise IncompleteConfig(
                f"the GGUF metadata has no {self._arch}.{key}, which a model of {self._arch} needs; convert "
                "the model again with a converter that writes it"
            )
        return self._found[key]

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return key in self._found

    def get(self, key: str, default: object = None) -> Any:
        self.read.add(key)
        return self._found.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Metadata:
    """The architecture's keys, and the config they make."""

    def __init__(self, metadata: Values, shapes: Shapes) -> None:
        self.arch, self.whole = metadata["general.architecture"], metadata
        prefix = f"{self.arch}."
        found = {k.removeprefix(prefix): metadata[k] for k in metadata if k.startswith(prefix)}
        self.values = ArchKeys(self.arch, found)
        self.prefix, self.shapes = prefix, shapes
        self.config, self.why = Config(), dict[str, str]()
        self.put("gguf_architecture", self.arch, f"{FILE} general.architecture")

    def put(self, key: str, value: object, why: str) -> None:
        self.config[key], self.why[key] = value, why

    def take(self, key: str, theirs: str, *usual: object) -> None:
        """The file's value of a key behind the prefix; without `usual` it must be there."""
        value = self.values.get(theirs, *usual) if usual else self.values[theirs]
        self.put(key, value, f"{FILE} {self.prefix}{theirs}")

    def size(self, key: str, name: str, axis: int) -> None:
        """A size that the first tensor of this name shows, if there is one."""
        found = next((n for n in self.shapes if n.endswith(f".{name}")), None)
        if found:
            shape = self.shapes[found]
            self.put(key, shape[axis], f"tensor {found} {list(shape)}")

    def layers(self, name: str) -> list[bool]:
        """Which layers have this tensor."""
        return [f"blk.{i}.{name}" in self.shapes for i in range(self.config["num_hidden_layers"])]


Particulars = Callable[[Metadata], None]
Names = Callable[[Config], Rules]


@dataclass(frozen=True, slots=True)
class Arch:
    """One `general.architecture`.

    `architecture`: the family's, as its config would name it. `constants`: what the format leaves to its
    readers, as keys of a config. `read`: what else this architecture's metadata and tensors mean. `names`:
    where its tensors are, where the general table does not say it (of a normalised config).
    `by_layer`: keys that may have a number for each layer, and what a config calls such a list. `is_written`:
    a model of the family is written as it, too, where an earlier one cannot say it.
    """

    name: str
    architecture: str
    constants: Mapping[str, object]
    read: Particulars
    names: Names | None
    by_layer: Mapping[str, str]
    is_written: bool


ARCHITECTURES: dict[str, Arch] = {}


def gguf_arch(
    name: str,
    architecture: str,
    *,
    constants: Mapping[str, object] = NOTHING,
    names: Names | None = None,
    by_layer: Mapping[str, str] = NOTHING,
    is_written: bool = True,
) -> Callable[[Particulars], Particulars]:
    """Register an architecture of GGUF; what it decorates completes the metadata's config."""

    def register(read: Particulars) -> Particulars:
        ARCHITECTURES[name] = Arch(name, architecture, constants, read, names, by_layer, is_written)
        return read

    return register


def plain_arch(
    name: str, architecture: str, *, names: Names | None = None, is_written: bool = True, **constants: Any
) -> None:
    """Register an architecture with metadata that says it all."""
    register = gguf_arch(name, architecture, constants=constants, names=names, is_written=is_written)
    register(_nothing)


def _nothing(m: Metadata) -> None:
    """This architecture's metadata says it all."""


def windows(m: Metadata, period: int) -> None:
    """Which layers have windows: those the file lists, or all but every n-th, `period` if it says no n."""
    told = m.values.get("attention.sliding_window_pattern")
    why = f"{FILE} {m.prefix}attention.sliding_window_pattern"
    if isinstance(told, list):
        kinds = [SLIDING if flag else FULL for flag in told[: m.config["num_hidden_layers"]]]
        m.put("layer_types", kinds, why)
    elif told:
        m.put("sliding_window_pattern", int(told), why)
    else:
        m.put("sliding_window_pattern", period, f"default (the {m.arch} format)")


def sizes_by_kind(m: Metadata, key: str) -> dict[str, int]:
    """The kinds of the layers, which the file lists, as `layer_types`; of each kind its one size.

    Raises UnsupportedModel where layers of one kind differ.
    """
    pattern = "attention.sliding_window_pattern"
    if not isinstance(m.values[pattern], list):
        raise UnsupportedModel(f"{m.prefix}{pattern} is {m.values[pattern]!r:.60}; expected is a list")
    windows(m, 1)
    kinds, sizes = m.config["layer_types"], m.values[key]
    each = sizes[: len(kinds)] if isinstance(sizes, list) else [sizes] * len(kinds)
    if len(each) != len(kinds) or len(kinds) != m.config["num_hidden_layers"]:
        raise UnsupportedModel(
            f"{m.prefix}{key} and {m.prefix}{pattern} have {len(each)} and {len(kinds)} numbers for "
            f"{m.config['num_hidden_layers']} layers"
        )
    found: dict[str, int] = {}
    for kind, size in zip(kinds, each, strict=True):
        if found.setdefault(kind, size) != size:
            raise UnsupportedModel(f"{m.prefix}{key} differs among layers of one kind: {each!r:.120}")
    return found


def check_router(m: Metadata, scores: str, *, renormalizes: bool | None, scales: bool = True) -> None:
    """Refuse a file that weighs experts otherwise than its family does. `renormalizes` None: it may say.

    `scales`: the family honours a factor of all weights. Raises UnsupportedModel.
    """
    usual = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}[scores]
    wanted: dict[str, object] = {"expert_gating_func": usual}
    wanted |= {} if renormalizes is None else {"expert_weights_norm": renormalizes}
    wanted |= {} if scales else {"expert_weights_scale": 1.0}
    for key, value in wanted.items():
        told = m.values.get(key, value)
        if told != value and not (key == "expert_weights_scale" and told == 0):  # 0: no factor
            raise UnsupportedModel(f"{m.prefix}{key} {told} is not implemented for {m.arch}; known: {value}")


def join_shared_experts(m: Metadata) -> None:
    """Shared experts are one: their tensors have the width of all of them, however many the file counts."""
    if m.config.get("n_shared_experts"):
        m.put("n_shared_experts", 1, f"{FILE} {m.prefix}expert_shared_count, as one")


def head_size(m: Metadata) -> None:
    """Mamba2's heads: the format has their number and the width of all."""
    width = m.config["mamba_d_ssm"] // m.config["mamba_n_heads"]
    m.put("mamba_d_head", width, f"{FILE} {m.prefix}ssm")
