"""Mistral's own config, `params.json`, in the words of transformers. No torch.

Its keys are those of mistral-inference's arguments, and of what came later: YaRN, queries that grow with
their position, latent attention and experts next to an MLP that is shared (Mistral Large 3).
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel

_WORDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
    **{x: x for x in ("head_dim", "vocab_size", "rope_theta", "dtype", "q_lora_rank", "kv_lora_rank")},
    **{x: x for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}
_LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
_OTHERS = ("moe", "quantization", "yarn", "llama_4_scaling", "sliding_window")
# What sees or hears next to the text model, and what says nothing of the arithmetic.
_UNREAD = {
    *("vision_encoder", "multimodal", "model_type", "version", "max_batch_size", "model_parallel"),
    *("causal", "multimodal_config", "image_token_id"),
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
DEFAULT_LENGTH = 128_000  # tokens; vLLM has the same where a file says nothing


def read_params(params: Mapping[str, object]) -> dict[str, object]:
    """The config of transformers that says the same. Raises UnsupportedModel for what it cannot say."""
    known = {*_WORDS, *_LENGTHS, *_OTHERS, *_UNREAD}
    strange = sorted(key for key, value in params.items() if key not in known and value and key[0] != "_")
    if strange:
        raise UnsupportedModel(
            f"params.json has {strange[0]!r}, which is not known; known are {', '.join(sorted(known))}"
        )
    found = {ours: params[theirs] for theirs, ours in _WORDS.items() if params.get(theirs) is not None}
    lengths = (params[key] for key in _LENGTHS if params.get(key) is not None)
    found["max_position_embeddings"] = next(lengths, DEFAULT_LENGTH)
    found |= _read_window(params.get("sliding_window"), params.get("n_layers"))
    found |= _read_positions(params)
    experts = _object(params, "moe")
    if params.get("qk_nope_head_dim"):
        found |= {
            "architectures": ["Mistral4ForCausalLM"],
            "model_type": "mistral4",
            **_read_experts(experts),
        }
    elif experts:
        found |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_read_mixtral(experts)}
    elif "rope_parameters" in found:
        found |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    else:
        found |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return found | _read_quantization(_object(params, "quantization"))


def _object(params: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = params.get(key) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"params.json: {key} must be an object, got {str(value)[:80]!r}")
    return value


def _refuse(key: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuse what an object has besides `known`, of which a value other than None must be the one."""
    for name, value in given.items():
        if name not in known or (known[name] is not None and value not in (known[name], None)):
            wanted = f"; read is {known[name]!r}" if known.get(name) is not None else ""
            raise UnsupportedModel(
                f"params.json: {key}.{name} = {str(value)[:80]!r} is not implemented{wanted}"
            )


def _read_window(given: object, num_layers: object) -> dict[str, object]:
    """One window for all layers, or a pattern of windows and None that repeats."""
    if not isinstance(given, list):
        return {"sliding_window": given}  # transformers has one where a config says nothing
    sizes = {size for size in given if size is not None}
    if len(sizes) != 1 or not isinstance(num_layers, int) or not given or num_layers % len(given):
        raise UnsupportedModel(
            f"params.json: sliding_window = {str(given)[:80]} must repeat one size, and None, over all layers"
        )
    words = ["full_attention" if size is None else "sliding_attention" for size in given]
    return {"sliding_window": sizes.pop(), "layer_types": words * min(num_layers // len(given), 4096)}


def _read_positions(params: Mapping[str, object]) -> dict[str, object]:
    yarn, growth = _object(params, "yarn"), _object(params, "llama_4_scaling")
    if not yarn and not growth:
        return {}
    _refuse("yarn", yarn, {**dict.fromkeys(_YARN), "apply_scale": None})
    _refuse("llama_4_scaling", growth, dict.fromkeys(("original_max_position_embeddings", "beta")))
    turns: dict[str, object] = {"rope_type": "yarn" if yarn else "default"}
    turns |= {ours: yarn[theirs] for theirs, ours in _YARN.items() if yarn.get(theirs) is not None}
    if params.get("rope_theta") is not None:
        turns["rope_theta"] = params["rope_theta"]
    if yarn.get("apply_scale") is False:
        turns["attention_factor"] = 1.0
    elif yarn and params.get("qk_nope_head_dim"):  # the scale of latents grows instead
        turns |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if growth:
        length = growth.get("original_max_position_embeddings")
        if turns.setdefault("original_max_position_embeddings", length) != length:
            raise UnsupportedModel(
                f"params.json: llama_4_scaling is of {length!r:.40} tokens and yarn of "
                f"{turns['original_max_position_embeddings']!r:.40}; models where both agree are implemented"
            )
    turns["llama_4_scaling_beta"] = growth.get("beta", 0.0)
    return {"rope_parameters": turns}


def _read_mixtral(given: Mapping[str, object]) -> dict[str, object]:
    _refuse("moe", given, {"num_experts": None, "num_experts_per_tok": None})
    return {
        "num_local_experts": given.get("num_experts"),
        "num_experts_per_tok": given.get("num_experts_per_tok"),
    }


def _read_experts(given: Mapping[str, object]) -> dict[str, object]:
    """Those of Mistral Large 3; none where all layers have an MLP alone."""
    fixed = {"route_every_n": 1, "renorm_strategy": "WEIGHTS", "use_load_balancing_bias": False}
    _refuse("moe", given, {**dict.fromkeys(_EXPERTS), **fixed})
    found = {ours: given[theirs] for theirs, ours in _EXPERTS.items() if given.get(theirs) is not None}
    return {**found, "norm_topk_prob": True} if found else {"n_routed_experts": 0}


def _read_quantization(given: Mapping[str, object]) -> dict[str, object]:
    if not given:
        return {}
    kind = given.get("qformat_weight")
    if kind is not None and kind != "fp8_e4m3":
        raise UnsupportedModel(
            f"params.json: quantization.qformat_weight = {str(kind)[:80]!r}; read is fp8_e4m3"
        )
    return {"quantization_config": {"quant_method": "fp8"} if kind else dict(given)}
