"""A tiny checkpoint of every family, by name: of transformers, of a plain description, or laid out otherwise.

Some families have the arithmetic of another one, and files of their own. Their checkpoints are those of the
other, under the keys and names of the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.families.common.registry import find
from tests.families import canvases, noisy_canvases, test_chameleon, test_nemotron_nas, tiny
from tests.families.gguf.published_kin import KIN, as_published
from tests.families.gguf.recorded import read_checkpoint
from tests.families.newer_oracles import DESCRIBED
from tests.families.oracles import ORACLES, read_oracle
from tests.families.parity import Memory

Config = dict[str, Any]
# Layouts of `published`, by the family of each.
PUBLISHED = {
    "baichuan": "baichuan",
    "bailing_v1": "bailing_moe",
    "bailing_v2": "bailing_moe_v2",
    "chatglm": "chatglm",
    "codeshell": "codeshell",
    "deepseek_v1": "deepseek",
    "exaone3": "exaone",
    "internlm2": "internlm2",
    "maincoder": "maincoder",
    "mimo_v2": "mimo_v2",
    "minicpm": "minicpm",
    "orion": "orion",
    "pangu": "PanguEmbedded",
    "param2": "param2moe",
    "qwen1": "qwen",
    "telechat3": "telechat3",
    "xverse": "PanguEmbedded",
    **{name: KIN[name][1] for name in ("yi", "mimo", "minicpmv_2", "molmo_o", "deepseek_vl2")},
}
# The variant of tiny.VARIANTS that each is, in the words of the state-spaces project.
STATE_SPACES = {"state_spaces_mamba1": "mamba", "state_spaces_mamba2": "mamba2"}
# Checkpoints that tests of their own write.
OTHERS = {"chameleon": "chameleon", "nemotron_nas": "nemotron-nas", "diffusion_gemma": "diffusion_gemma"}
NAMES = (*tiny.VARIANTS, *ORACLES, *DESCRIBED, *PUBLISHED, *STATE_SPACES, *OTHERS, *canvases.NAMES)
CANVAS = 4  # tokens, as a block has in the tests of runners


def read_model(name: str, folder: Path) -> tuple[Config, Memory]:
    """The config and the tensors of one of NAMES; `folder`: where transformers may write its files."""
    if name in ORACLES:
        return read_oracle(name)
    if name in DESCRIBED:
        config = DESCRIBED[name].config
        tensors = DESCRIBED[name].checkpoint(config)
        return config, Memory({key: tensor.float() for key, tensor in tensors.items()})
    if name in PUBLISHED:
        given, stored, _ = read_checkpoint(name, folder)
        config, stored = as_published(name, dict(given), stored)
        return json.loads(json.dumps(config)), Memory(stored)
    if name in canvases.NAMES:
        config, stored = canvases.write(name, folder, CANVAS)
        return config, Memory(stored)
    if name == "diffusion_gemma":
        return noisy_canvases.read(folder)
    if name == "nemotron_nas":
        return test_nemotron_nas.CONFIG, Memory(test_nemotron_nas.write_checkpoint()[0])
    if name == "chameleon":
        config, stored, _ = test_chameleon.checkpoint(folder)
        return config, Memory(stored)
    tiny.write(STATE_SPACES.get(name, name), folder)
    config, stored, _ = tiny.read(folder)
    if name in STATE_SPACES:
        config, stored = as_state_spaces(config, stored)
    return config, Memory(stored)


def as_state_spaces(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Config, dict[str, Tensor]]:
    """A checkpoint of transformers' Mamba or Mamba2 as the state-spaces project keeps it."""
    words = {"state_size": "d_state", "head_dim": "headdim", "n_groups": "ngroups"}
    if config["model_type"] == "mamba":
        sizes: Config = {"d_state": config["state_size"], "dt_rank": config["time_step_rank"]}
    else:
        sizes = {"layer": "Mamba2", **{theirs: config[ours] for ours, theirs in words.items()}}
    theirs = {
        "d_model": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"] - 2,  # padded up to a multiple
        "pad_vocab_size_multiple": config["vocab_size"],
        "tie_embeddings": False,
        "ssm_cfg": sizes,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
    }
    if config["model_type"] == "mamba2":
        theirs |= {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}
    return theirs, {
        name.replace("backbone.embeddings", "backbone.embedding"): w for name, w in tensors.items()
    }


def family_of(name: str) -> str:
    """The family of one of NAMES. No checkpoint is written: reading it shows that this is so."""
    if name in PUBLISHED or name in OTHERS:
        return {**PUBLISHED, **OTHERS}[name]
    if name in canvases.NAMES:
        return name
    if name in STATE_SPACES:
        return "MambaLMHeadModel"
    if name in ORACLES or name in DESCRIBED:
        return find(ORACLES[name][0] if name in ORACLES else DESCRIBED[name].config).name
    variant = tiny.VARIANTS[name]
    kind = getattr(transformers, variant.config).model_type
    written = variant.model or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    classes = [written] if isinstance(written, str) else list(written)
    return find({**variant.changes, "architectures": classes, "model_type": kind}).name
