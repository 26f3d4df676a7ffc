"""ModernBERT as a decoder (Ettin): windows in two of three layers, and a head with a layer of its own."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import split_gate_up, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.spec.model import BranchSpec, HeadSpec, ModelSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"


@family(
    "ModernBertDecoderForCausalLM",
    model_types=("modernbert-decoder",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "local_attention": 128,
        "rope_theta": 160_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    honours=("sliding_window",),
)
def modernbert_decoder(c: Config) -> tuple[ModelSpec, NameMap]:
    """ModernBERT: embeddings are normed, so the first layer's attention has no norm."""
    every, count = c.get("global_attn_every_n_layers") or 3, len(c["layer_types"])
    if not c.get("layer_words"):  # configs of 2025 name no layers
        c["layer_types"] = [SLIDING if i % every else FULL for i in range(count)]
    c["sliding_window"] = c.get("sliding_window") or c["local_attention"] // 2
    for kind, word in ((FULL, "global_rope_theta"), (SLIDING, "local_rope_theta")):
        if theta := c.get(word):
            c["rope_parameters"][kind]["rope_theta"] = theta
    each, ffn = norm(c, "layer"), BranchSpec("ffn", mlp(c), norm(c, "layer"))
    layers = [
        (BranchSpec("attn", gqa(c, k), each if i else None), ffn) for i, k in enumerate(c["layer_types"])
    ]
    own: Rules = {"embed.bias": "decoder.bias"} if c["tie_word_embeddings"] else {}
    names: Rules = {
        "embed.norm": "model.embeddings.norm",
        "embed": "model.embeddings.tok_embeddings",
        "norm": "model.final_norm",
        "head.transform.linear": "lm_head.dense",
        "head.transform.norm": "lm_head.norm",
        "head": "decoder",
        f"{ATTN}.norm": f"{L}.attn_norm",
        f"{FFN}.norm": f"{L}.mlp_norm",
        f"{ATTN}.o": f"{L}.attn.Wo",
        f"{ATTN}.{{x}}": f"{L}.attn.{{x}}_proj",
        f"{FFN}.down": f"{L}.mlp.Wo",
        **split_gate_up(FFN, f"{L}.mlp.Wi"),
    }
    require(c, "ModernBERT", classifier_activation=("gelu",))
    head = HeadSpec("gelu", each)
    spec = model(c, "modernbert-decoder", layers, norm=each, embed_norm=each, head=head)
    return spec, NameMap(own, names, ignored=unused_patterns(c, r"^decoder\.weight$"))
