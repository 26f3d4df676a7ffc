"""LongCat-Flash-Lite: transformers' LongCat-Flash over the mean of a token's and its n-grams' embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

Config = dict[str, Any]
HIDDEN, END = 36, 5
SIZES: Config = {
    "vocab_size": 97, "hidden_size": HIDDEN, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "n_routed_experts": 6,
    "zero_expert_num": 3, "moe_topk": 4, "expert_ffn_hidden_size": 20, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "eos_token_id": END, "bos_token_id": 1,
    "pad_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
CONFIG: Config = {
    **SIZES, "architectures": ["LongcatFlashNgramForCausalLM"], "model_type": "longcat_flash_ngram",
    "ngram_vocab_size_ratio": 1.5, "emb_neighbor_num": 4, "emb_split_num": 2,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA",
    "zero_expert_type": "identity",
}  # fmt: skip
AT = "model.ngram_embeddings"


def _sizes(c: Config) -> list[int]:
    count = c["emb_split_num"] * (c["emb_neighbor_num"] - 1)
    return [int(c["ngram_vocab_size_ratio"] * c["vocab_size"]) + 1 + 2 * i for i in range(count)]


def _model() -> LongcatFlashForCausalLM:
    torch.manual_seed(3)
    model = LongcatFlashForCausalLM(LongcatFlashConfig(**SIZES)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.ndim == 1))
    return model


def checkpoint(c: Config) -> dict[str, Tensor]:
    """Random tensors, in double precision."""
    tensors, made = dict(_model().state_dict()), torch.Generator().manual_seed(4)
    dim = HIDDEN // len(_sizes(c))
    for i, rows in enumerate(_sizes(c)):
        for name, shape in (("embedders", (rows, dim)), ("post_projs", (HIDDEN, dim))):
            tensors[f"{AT}.{name}.{i}.weight"] = torch.randn(shape, dtype=torch.float64, generator=made)
    return tensors


def _digits(ids: list[int], t: int, length: int) -> list[int]:
    """The tokens of the n-gram that ends at place t, the last one first: none before the last end."""
    found = [ids[t]]
    for back in range(1, length):
        if t < back or ids[t - back] == END:
            break
        found.append(ids[t - back])
    return found


def logits(c: Config, t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids: [T] -> [T, vocab] float64."""
    model, split = _model(), c["emb_split_num"]
    model.load_state_dict({k: w for k, w in t.items() if not k.startswith(AT)})
    total = t["model.embed_tokens.weight"][ids].clone()
    for i, rows in enumerate(_sizes(c)):
        texts = (_digits(ids.tolist(), at, i // split + 2) for at in range(len(ids)))
        numbers = [sum(token * c["vocab_size"] ** k for k, token in enumerate(text)) % rows for text in texts]
        total += t[f"{AT}.embedders.{i}.weight"][numbers] @ t[f"{AT}.post_projs.{i}.weight"].T
    with torch.no_grad():
        out: Tensor = model(inputs_embeds=(total / (1 + len(_sizes(c))))[None]).logits[0]
    return out
