"""A model as GGUF: the architecture that can say it, its tensors' names and shapes, its metadata.

What llama.cpp has no architecture for is written under the checkpoint's own names, with its own config.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from plait.checkpoint.readers.gguf_metadata import ARCHITECTURE, CONFIG, MAX_NAME_BYTES, NAMES, stand_in
from plait.convert.gguf.file import TYPES
from plait.convert.gguf.keys import model_keys
from plait.convert.plan.passthrough import PassthroughTarget
from plait.convert.plan.reconcile_specs import reconcile
from plait.convert.plan.source import Model, check_complete
from plait.convert.plan.tensor_plan import Made, plan_tensors
from plait.errors import UnsupportedFormat, UnsupportedModel
from plait.families.common.registry import families_by_name, names_in
from plait.families.common.resolved import Resolved
from plait.families.config.normalize import Config
from plait.families.config.wrappers import NESTS
from plait.families.gguf.arch import ARCHITECTURES
from plait.families.gguf.names import gguf_names
from plait.families.resolve import resolve
from plait.ops.rope import frequencies
from plait.spec.model import AttentionSpec, MlaSpec, ModelSpec, MoeSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import DeltaNetSpec, Mamba2Spec, Wkv7Spec

log = logging.getLogger("plait")
_MAX_DIMS = 4  # of GGUF's tensors
FORM = "GGUF"
# Families that are written as another's architecture; those of all others are registered for them.
ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Text models that see, hear or talk are also of families of their own, with other defaults.
        **{name: (name,) for name in ("qwen2", "qwen3", "granite")},
        **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), ("qwen3moe",)),
        "ernie4_5_vl_moe_text": ("ernie4_5-moe",),
        "hunyuan_vl_text": ("hunyuan-dense",),
        "mistral": ("llama",),
        "iquestcoder": ("llama",),
        "param2moe": ("bailingmoe2",),
        "rwkv6": ("rwkv6",),  # of flash-linear-attention
        "mixtral": ("llama",),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("deepseek2",)),
        "olmo3": ("olmo2",),
        "bamba": ("granitehybrid",),
        "falcon_mamba": ("mamba",),
        "oxidizr": ("llama", "mamba2", "deepseek2"),
        # Llama's and GLM's layers, published under other names.
        "chatglm": ("chatglm",),
        **dict.fromkeys(("telechat", "telechat3", "teleflm"), ("llama",)),
    }
)
NO_WINDOWS = {"llama", "phi3"}
# Architectures of which llama.cpp reads no key on weights of experts; of them those without a sum of one.
UNSUMMED = {"jamba", "olmoe", "qwen2moe"}
FIXED_WEIGHTS = UNSUMMED | {
    *("dbrx", "granitehybrid", "granitemoe", "kimi-linear", "lfm2moe", "llama", "minimax-01", "qwen35moe"),
    *("qwen3moe", "qwen3next"),
}
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufTarget:
    """What is to be written: `keys` of the model (not of its tokenizer), its tensors, and small new ones.

    notes: what llama.cpp does not do, and Plait does, with the same file.
    """

    arch: str
    keys: Mapping[str, object]
    made: tuple[Made, ...]
    extra: Mapping[str, Tensor]  # float32
    notes: tuple[str, ...] = ()


class Unsayable(UnsupportedFormat):
    """A model that llama.cpp has no words for. `reasons`: for each architecture what it lacks."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


def gguf_target(model: Model) -> GgufTarget:
    """The model in llama.cpp's words. Raises Unsayable."""
    family, arches = model.resolved.family, arches_of(model)
    if not arches:
        raise Unsayable(f"llama.cpp has no architecture for {family} models")
    reasons = []
    for arch in arches:
        try:
            return _as_arch(model, arch)
        except (UnsupportedFormat, UnsupportedModel) as error:
            reasons.append(f"{arch}: {error}")
    why = f" ({reasons[0]})" if len(reasons) == 1 else ""
    raise Unsayable(f"llama.cpp has no architecture that says all of this {family} model{why}", reasons)


def _notes(spec: ModelSpec, arch: str) -> Iterator[str]:
    if spec.mtp:
        yield "the model's head for drafts (--speculate mtp) is not written"
    yield from _expert_notes(spec, arch)
    attention = list(spec.mixers_of(AttentionSpec))
    if arch in NO_WINDOWS and any(m.window for m in attention):
        yield f"llama.cpp has no windows for {arch}: there, attention sees all keys"
    if any(m.rope and m.rope.scaling.get("rope_type") == "dynamic" for m in attention):
        yield (
            f"llama.cpp does not stretch positions by length (dynamic NTK): its model is this one up to "
            f"{spec.max_len:,} tokens"
        )


def _expert_notes(spec: ModelSpec, arch: str) -> Iterator[str]:
    """What llama.cpp has fixed for the architecture, whatever the file says."""
    routers = [moe.router for moe in spec.mixers_of(MoeSpec) if moe.top_k > 1]
    sums = arch not in UNSUMMED
    if arch in FIXED_WEIGHTS and any(router.renormalize != sums for router in routers):
        yield f"llama.cpp {'makes' if sums else 'never makes'} weights of experts sum to one in {arch} models"
    if arch in FIXED_WEIGHTS - {"kimi-linear"} and any(router.scale != 1 for router in routers):
        yield f"llama.cpp has no factor of the weights of experts for {arch}: there it is 1"


def arches_of(model: Model) -> list[str]:
    """The architectures that may say this model; with experts, first those that are named for them."""
    families = families_by_name()
    own = next((families[n] for n in names_in(model.resolved.config) if n in families), None)
    written = (a for a in ARCHITECTURES.values() if a.is_written)
    found = [a.name for a in written if own and families.get(a.architecture) is own]
    found += [name for name in ALSO.get(model.resolved.family, ()) if name not in found]
    has_experts = any(model.spec.mixers_of(MoeSpec))
    return sorted(found, key=lambda name: ("moe" in name) != has_experts)


def _as_arch(model: Model, arch: str) -> GgufTarget:
    spec = model.spec
    config = Config({**model.resolved.config, **_counts(spec), "gguf_architecture": arch})
    made = plan_tensors(model.wanted, gguf_names(config), FORM)
    made = [replace(m, shape=_shape(m, spec, arch)) for m in made]
    keys = {"general.architecture": arch, **model_keys(arch, spec, config)}
    extra = _extra(spec)
    theirs = read_back(keys, made, extra)
    check_complete(
        theirs, {m.name: m.shape for m in made} | {name: tuple(t.shape) for name, t in extra.items()}
    )
    agreeing = tuple(reconcile(made, spec, theirs.spec, model.wanted, "the format"))
    return GgufTarget(arch, keys, agreeing, extra, tuple(_notes(spec, arch)))


def read_back(keys: Mapping[str, object], made: list[Made], extra: Mapping[str, Tensor]) -> Resolved:
    """What a reader of the file will take the model for."""
    shapes = {m.name: m.shape for m in made} | {name: tuple(t.shape) for name, t in extra.items()}
    return resolve(None, shapes, gguf=keys, read=lambda name: extra[name])


def _counts(spec: ModelSpec) -> dict[str, object]:
    """What `gguf_names` asks a config for, of any model."""
    found: dict[str, object] = {"num_hidden_layers": len(spec.layers)}
    mla = next(spec.mixers_of(MlaSpec), None)
    if mla:
        found |= {"num_attention_heads": mla.num_heads, "kv_lora_rank": mla.kv_rank}
        found["qk_nope_head_dim"] = mla.nope_dim
    return found


def _shape(made: Made, spec: ModelSpec, arch: str) -> tuple[int, ...]:
    """Shapes that the format has otherwise than a plain tensor of ours."""
    kind = made.name.removeprefix("blk.").partition(".")[2]
    grouped = next(spec.mixers_of(Mamba2Spec), None)
    if kind in ("ssm_a", "ssm_d") and grouped:
        return (*made.shape, 1)
    if kind == "ssm_norm.weight" and grouped:
        return (grouped.norm_groups, made.shape[0] // grouped.norm_groups)
    if arch in ("plamo2", "stablelm") and kind in ("attn_q_norm.weight", "attn_k_norm.weight"):
        dim = next(spec.mixers_of(AttentionSpec)).head_dim
        return (made.shape[0] // dim, dim)
    if kind == "ffn_gate_inp_shexp.weight":
        return (made.shape[-1],)
    delta = next(spec.mixers_of(DeltaNetSpec), None)
    if delta and delta.decay == "channel":
        if kind == "ssm_a":
            return (1, 1, delta.num_heads, 1)
        if kind.startswith("ssm_conv1d_"):
            return (1, made.shape[0], 1, made.shape[1])
    return made.shape


def _extra(spec: ModelSpec) -> dict[str, Tensor]:
    """Divisors of rotary frequencies, where no key can name the scaling, and what RWKV-7 does not read."""
    ropes = [m.rope for m in spec.mixers_of(AttentionSpec) if m.rope]
    for rope in ropes:
        kind = rope.scaling.get("rope_type")
        if kind in ("llama3", "divisors"):
            return {ROPE_FREQS: divisors(rope, spec.max_len)}
        if kind == "longrope":
            return {
                f"rope_factors_{x}.weight": torch.tensor(rope.scaling[f"{x}_factor"], dtype=torch.float32)
                for x in ("long", "short")
            }
    first = next(spec.mixers_of(Wkv7Spec), None)
    if first:  # llama.cpp wants a share of values in the first layer, too, and reads none there
        size, rank = first.num_heads * first.head_dim, first.ranks[1]
        shapes = {"v0": (size,), "v1": (rank, spec.hidden_size), "v2": (size, rank)}
        return {f"blk.0.time_mix_{x}.weight": torch.zeros(shape) for x, shape in shapes.items()}
    return {}


def divisors(rope: RopeSpec, max_len: int) -> Tensor:
    """By how much each plain frequency is divided, [dim / 2] float32."""
    plain, _ = frequencies(RopeSpec(rope.dim, rope.theta), max_len)
    found, _ = frequencies(rope, max_len)
    return (plain / found).to(torch.float32)


@dataclass(frozen=True, slots=True)
class OwnTarget:
    """What is to be written: `keys` of the model (not of its tokenizer), and its tensors."""

    keys: Mapping[str, object]
    made: tuple[Made, ...]


def own_target(made: Sequence[Made], config: Mapping[str, object] | None) -> OwnTarget:
    """The checkpoint as it is. `config`: what its config.json should say, None if it has none."""
    given, names = [], list[str]()
    for one in made:
        if len(one.name.encode()) > MAX_NAME_BYTES:
            given.append(_rename_made(one, stand_in(len(names))))
            names.append(one.name)
        else:
            given.append(one)
    keys: dict[str, object] = {"general.architecture": ARCHITECTURE}
    if config is not None:
        keys[CONFIG] = json.dumps(config, ensure_ascii=False)
    return OwnTarget(keys | ({NAMES: names} if names else {}), tuple(given))


def writable(kept: PassthroughTarget) -> list[Made]:
    """All tensors, except unread ones that GGUF has no type or shape for; the log names those."""
    found = {made.name: (made, _is_writable(kept, made)) for made in kept.list_made()}
    if left_out := [name for name, (_, is_writable) in found.items() if not is_writable]:
        log.warning(
            "%d tensors that the model does not read are left out, GGUF has no type for them: %s",
            len(left_out),
            ", ".join(left_out[:4]),
        )
    return [made for made, is_writable in found.values() if is_writable]


def _is_writable(kept: PassthroughTarget, made: Made) -> bool:
    if made.roles:
        return True
    value = kept.read(made.name)
    is_known = not isinstance(value, Tensor) or value.dtype in TYPES
    return is_known and 0 < len(made.shape) <= _MAX_DIMS and 0 not in made.shape


def _rename_made(made: Made, name: str) -> Made:
    return replace(made, name=name, turned=None if made.turned is None else replace(made.turned, name=name))


def with_overrides(
    config: Mapping[str, object] | None, given: Mapping[str, object]
) -> dict[str, object] | None:
    """The config with the values of --set, at the top and wherever a text model's keys may be."""
    if not given:
        return None if config is None else dict(config)
    found = {**(config or {}), **given}
    for nest in (*NESTS, "model"):
        if isinstance(own := found.get(nest), Mapping):
            found[nest] = with_overrides(own, given)
    return found


def drop_packing(config: Mapping[str, object]) -> dict[str, object]:
    """The config without what it says of how tensors are packed, which they no longer are."""
    return {
        k: drop_packing(v) if isinstance(v, Mapping) else v
        for k, v in config.items()
        if k not in ("quantization_config", "compression_config")
    }
