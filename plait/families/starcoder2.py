"""StarCoder2: layer norms with biases, a plain feed-forward, biases on every linear layer."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.hf_config import HfConfig
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp
from plait.families.config.normalize import Config
from plait.families.gguf.arch import plain_arch
from plait.spec.model import BranchSpec, ModelSpec


@family(
    "Starcoder2ForCausalLM",
    model_types=("starcoder2",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker((Q, "mlp.c_fc.weight"), order=370),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 16_384},
    ),
    hf=HfConfig(words={"norm_eps": "norm_epsilon"}),
)
def starcoder2(c: Config) -> tuple[ModelSpec, NameMap]:
    """StarCoder2 3b, 7b and 15b; the last has a window in every layer."""
    each = norm(c, "layer")
    ffn = BranchSpec("ffn", plain_mlp(c), each)
    layers = [(BranchSpec("attn", gqa(c, kind), each), ffn) for kind in c["layer_types"]]
    names: Rules = {
        "layers.{i}.ffn.up": "model.layers.{i}.mlp.c_fc",
        "layers.{i}.ffn.down": "model.layers.{i}.mlp.c_proj",
    }
    spec = model(c, "starcoder2", layers, norm=each)
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


plain_arch("starcoder2", "Starcoder2ForCausalLM")
plain_arch("codeshell", "Starcoder2ForCausalLM", is_written=False)
