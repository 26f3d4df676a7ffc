"""gpt-oss: attention with sinks, windows in every other layer, experts with biases in each."""

from __future__ import annotations

import torch

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import LOCAL, HfConfig
from plait.families.common.recipes import Stored, expert_bias, expert_rows, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.quant.weight import as_tensor, pick_rows
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec, MoeSpec

FFN, MLP = "layers.{i}.ffn", "model.layers.{i}.mlp"
CLAMP = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # what the activation is made of
YARN = {
    "rope_type": "yarn",
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 32.0,
    "truncate": False,
}


@family(
    "GptOssForCausalLM",
    model_types=("gpt_oss",),
    defaults={
        "norm_eps": 1e-5,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rope_parameters": YARN,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_experts_per_tok": 4,
        **CLAMP,
    },
    honours=("sliding_window", "swiglu_limit"),
    detection=Detection(
        markers=(Marker(("self_attn.sinks", "mlp.router.weight"), order=250),),
        top_k=4,
        usual={
            "rope_theta": 150_000.0,
            "rope_scaling": YARN,
            "max_position_embeddings": 131_072,
        },
    ),
    hf=HfConfig(words=LOCAL, lists_layers=True),
)
def gpt_oss(c: Config) -> tuple[ModelSpec, NameMap]:
    """gpt-oss 20b and 120b: from bfloat16 stacks, or from MXFP4 as it was published."""
    for key, known in CLAMP.items():
        if c[key] != known:
            raise UnsupportedModel(f"{key} = {c[key]!r} is not implemented for gpt-oss; known: {known}")
    if c.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {c['hidden_act']!r} is not implemented for gpt-oss; known: silu")
    each, count = norm(c), c["num_experts"]
    expert = MlpSpec(c["moe_intermediate_size"], "swiglu_oai")
    ffn = BranchSpec("ffn", MoeSpec(count, c["num_experts_per_tok"], expert), each)
    layers = [(BranchSpec("attn", gqa(c, kind, sinks=True), each), ffn) for kind in c["layer_types"]]
    names = NameMap(_names(count), transformer(), ignored=unused_patterns(c))
    return model(c, "gpt_oss", layers), names


def _names(count: int) -> Rules:
    up, down = f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj"
    one = f"{FFN}.experts.{{e}}"
    return {
        "layers.{i}.attn.sinks": "model.layers.{i}.self_attn.sinks",
        f"{FFN}.router": f"{MLP}.router",
        f"{one}.gate.weight": _every_other(0, count, up),
        f"{one}.up.weight": _every_other(1, count, up),
        f"{one}.down.weight": Derived(
            lambda w, e, **_: _expert_matrix(w, int(e), count), (down,), (Back(lambda w: w.T, stack=count),)
        ),
        f"{one}.gate.bias": _every_other_bias(0, count, f"{up}_bias"),
        f"{one}.up.bias": _every_other_bias(1, count, f"{up}_bias"),
        f"{one}.down.bias": expert_bias(f"{down}_bias"),
    }


def _every_other(first: int, count: int, source: str) -> Derived:
    """Rows of gate (0) or up (1), which alternate in an expert's weights."""

    def chosen(w: Stored, e: str, **_: str) -> Stored:
        rows = _expert_matrix(w, int(e), count)
        return pick_rows(rows, torch.arange(first, rows.shape[0], 2))

    return Derived(chosen, (source,), (Back(at=first, of=2, stack=count, join=_in_turns),))


def _every_other_bias(first: int, count: int, source: str) -> Derived:
    back = Back(at=first, of=2, stack=count, join=_in_turns)
    return Derived(lambda b, e, **_: as_tensor(b)[int(e), first::2], (source,), (back,))


def _in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[out, in] each, or [out] -> [in, 2 out], or [2 out]: a plain stack has its matrices turned."""
    both = torch.stack((gate, up), 1).flatten(0, 1)
    return both.T if both.ndim == 2 else both


def _expert_matrix(w: Stored, e: int, count: int) -> Stored:
    """One expert's matrix [out, in]: plain stacks are [count, in, out], packed ones [count * out, in]."""
    one = expert_rows(w, e, count)
    return one.T if isinstance(w, torch.Tensor) and w.ndim == 3 and isinstance(one, torch.Tensor) else one


def _gguf_names(c: Config) -> Rules:
    one, b = f"{FFN}.experts.{{e}}", "blk.{i}"
    return {
        "layers.{i}.attn.sinks": f"{b}.attn_sinks.weight",
        f"{FFN}.norm": f"{b}.post_attention_norm",
        **{f"{one}.{x}.bias": expert_bias(f"{b}.ffn_{x}_exps.bias") for x in ("gate", "up", "down")},
    }


@gguf_arch("gpt-oss", "GptOssForCausalLM", names=_gguf_names)
def _gpt_oss(m: Metadata) -> None:
    windows(m, 2)
    if scaling := m.config.get("rope_scaling"):
        # The file does not say that the ramp ends between two dimensions.
        m.put("rope_scaling", {**scaling, "truncate": False}, f"{FILE} and a default of gpt-oss")
