"""What a file's keys say is honoured or refused: no architecture, effect or value passes in silence."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from plait.errors import ConfigError, PlaitError, UnsupportedModel
from plait.families.common.alibi import spread_slopes
from plait.families.common.registry import families_by_name
from plait.families.config.normalize import IncompleteConfig
from plait.families.dflash import GGUF as DFLASH
from plait.families.eagle import GGUF as EAGLE
from plait.families.gemma4_assistant import GGUF as ASSISTANT
from plait.families.gguf.arch import ARCHITECTURES
from plait.families.gguf.effects import HARMLESS
from plait.families.gguf.unserved import UNSERVED
from plait.spec.model import AttentionSpec, MoeSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import DeltaNetSpec
from tests.families.gguf.recorded import RECORDED
from tests.families.gguf.test_recorded import metadata_of
from tests.families.parity import Memory, resolved

# All names of llama.cpp (of 2026-11) that are no file types of other programs.
LLAMA_CPP = (
    *("afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2"),
    *("bailingmoe3", "bert", "bitnet", "bloom", "chameleon", "chatglm", "clip", "codeshell", "cogvlm"),
    *("cohere2", "cohere2moe", "command-r", "dbrx", "deci", "deepseek", "deepseek2", "deepseek2-ocr"),
    *("deepseek32", "deepseek4", "dflash", "dots1", "dots3note", "dream", "eagle3", "ernie4_5"),
    *("ernie4_5-moe", "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma"),
    *("gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4-assistant", "glm-dsa", "glm4"),
    *("glm4moe", "glm5-next", "gpt-oss", "gpt2", "gptj", "gptneox", "granite", "granite_swa"),
    *("granitehybrid", "granitemoe", "graniteswitch", "grok", "grovemoe", "hrm_text", "hunyuan-dense"),
    *("hunyuan-moe", "hunyuan_vl", "hy_v3", "hy_v4", "internlm2", "jais", "jais2", "jamba"),
    *("jina-bert-v2", "jina-bert-v3", "kimi-k3", "kimi-linear", "laguna", "lfm2", "lfm2moe", "llada"),
    *("llada-moe", "llama", "llama-embed", "llama4", "maincoder", "mamba", "mamba2", "maple", "mellum"),
    *("mimo2", "minicpm", "minicpm3", "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4"),
    *("modern-bert", "mpt", "muse-glimmer", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe"),
    *("neo-bert", "nomic-bert", "nomic-bert-moe", "olmo", "olmo2", "olmoe", "openelm", "orion"),
    *("paddleocr", "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "plm"),
    *("pockettts", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe"),
    *("qwen3next", "qwen3tts", "qwen3vl", "qwen3vlmoe", "qwen4exp", "refact", "rnd1", "rwkv6"),
    *("rwkv6qwen2", "rwkv7", "seed_oss", "smallthinker", "smollm3", "spark2_5", "stablelm", "starcoder"),
    *("starcoder2", "step35", "t5", "t5encoder", "talkie", "wavtokenizer-dec", "xverse"),
)


def test_every_architecture_of_llama_cpp_is_served_or_refused_by_a_sentence() -> None:
    families_by_name()
    heads = {EAGLE, DFLASH, ASSISTANT}  # a head is no model
    assert set(LLAMA_CPP) <= ARCHITECTURES.keys() | UNSERVED.keys() | heads
    assert not ARCHITECTURES.keys() & UNSERVED.keys()
    for arch, why in UNSERVED.items():
        with pytest.raises(UnsupportedModel, match=f"'{arch}' cannot be served: ") as error:
            resolved(Memory(), gguf={"general.architecture": arch})
        assert why in str(error.value)


def plain(arch: str, **keys: Any) -> Any:
    file = Memory({"token_embd.weight": torch.zeros(97, 32)})
    if "expert_count" in keys:
        file |= {f"blk.{i}.ffn_gate_inp.weight": torch.zeros(keys["expert_count"], 32) for i in range(4)}
    return resolved(file, gguf=metadata_of(arch, **keys)).spec


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_a_key_that_changes_the_arithmetic_is_refused_where_it_is_unread(key: str) -> None:
    value = "relu" if key == "hidden_activation" else 3
    with pytest.raises(UnsupportedModel, match=rf"qwen2\.{key} is .* not implemented for qwen2"):
        plain("qwen2", **{key: value})
    with pytest.raises(UnsupportedModel, match=rf"qwen2\.{key} is"):
        plain("qwen2", **{key: [0, value]})
    assert plain("qwen2", **{key: HARMLESS[key][0]})


def test_heads_of_values_that_are_narrower_than_those_of_keys_are_refused_where_they_are_unread() -> None:
    with pytest.raises(UnsupportedModel, match=r"qwen3\.attention\.value_length is 4"):
        plain("qwen3", **{"attention.key_length": 8, "attention.value_length": 4})


def test_another_base_of_windows_is_refused_where_it_is_unread() -> None:
    keys = {"attention.sliding_window": 4, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    with pytest.raises(UnsupportedModel, match=r"gpt-oss\.rope\.freq_base_swa is 10000"):
        plain("gpt-oss", **keys, expert_count=4, expert_used_count=2)


def test_experts_of_smallthinker_are_scored_by_softmax_or_sigmoid() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    for score in (1, 2):
        assert plain("smallthinker", **keys, expert_gating_func=score)
    with pytest.raises(UnsupportedModel, match=r"smallthinker\.expert_gating_func is 3; .* or 2 \(sigmoid\)"):
        plain("smallthinker", **keys, expert_gating_func=3)


def test_experts_that_are_scored_otherwise_are_refused() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    with pytest.raises(
        UnsupportedModel, match=r"qwen3moe\.expert_gating_func is 2, and qwen3moe models .* softmax"
    ):
        plain("qwen3moe", expert_gating_func=2, **keys)
    assert plain("qwen3moe", expert_gating_func=1, **keys)
    spec = plain("qwen3moe", expert_weights_scale=0.0, **keys)  # no scale at all
    assert {moe.router.scale for moe in spec.mixers_of(MoeSpec)} <= {1.0}


@pytest.mark.parametrize(
    ("arch", "key", "value", "said"),
    [
        ("cohere2moe", "expert_weights_norm", False, "cohere2moe models have True there"),
        ("cohere2moe", "expert_weights_scale", 1.7, "cohere2moe models have 1 there"),
        ("olmoe", "expert_gating_func", 3, "olmoe models score experts by a softmax"),
        ("dbrx", "expert_group_count", 2, "dbrx models choose among 1 groups"),
    ],
)
def test_experts_that_are_chosen_or_weighed_otherwise_are_refused(
    arch: str, key: str, value: object, said: str
) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    keys |= {"expert_group_used_count": 1, "expert_gating_func": 1, "attention.head_count_kv": 2}
    usual = {"expert_weights_norm": arch != "olmoe", "expert_weights_scale": 1.0, "expert_group_count": 1}
    assert plain(arch, **keys, **usual)
    with pytest.raises(UnsupportedModel, match=f"{arch}.{key} is .*{said}"):
        plain(arch, **{**keys, **usual, key: value})


def test_groups_of_which_all_are_chosen_change_nothing() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "attention.head_count_kv": 2}
    assert plain("dbrx", **keys, expert_group_count=2, expert_group_used_count=2)


def test_windows_of_gemma_2_are_where_its_file_has_them() -> None:
    def windows_of(**keys: Any) -> list[int | None]:
        spec = plain("gemma2", **{"attention.sliding_window": 5, **keys})
        return [mixer.window for mixer in spec.mixers_of(AttentionSpec)]

    assert windows_of() == [5, None, 5, None]
    assert windows_of(**{"attention.sliding_window_pattern": 4}) == [5, 5, 5, None]
    assert windows_of(**{"attention.sliding_window_pattern": [False, True] * 2}) == [None, 5, None, 5]


def test_another_base_of_chunks_is_refused() -> None:
    keys = {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 8}
    keys |= {"interleave_moe_layer_step": 1}
    with pytest.raises(UnsupportedModel, match=r"llama4\.rope\.freq_base_swa is 5000"):
        plain("llama4", **keys, **{"rope.freq_base_swa": 5e3})


def test_another_base_of_windows_of_smallthinker_is_refused() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "rope.freq_base": 1e6}
    with pytest.raises(UnsupportedModel, match=r"smallthinker\.rope\.freq_base_swa is 5000"):
        plain("smallthinker", **keys, **{"attention.sliding_window": 4, "rope.freq_base_swa": 5e3})


def test_a_scaling_that_a_family_with_two_kinds_of_positions_drops_is_refused() -> None:
    keys = {"attention.key_length": 8, "rope.dimension_count": 8, "rope.freq_base": 1e4}
    assert plain("spark2_5", **keys)
    with pytest.raises(UnsupportedModel, match=r"spark2_5\.rope\.scaling is .*linear.* not implemented"):
        plain("spark2_5", **keys, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})


def test_mpt_with_learned_positions_is_refused() -> None:
    assert plain("mpt", **{"attention.max_alibi_bias": 8.0, "attention.head_count_kv": 4})
    with pytest.raises(UnsupportedModel, match="alibi"):
        plain("mpt", **{"attention.max_alibi_bias": 0.0, "attention.head_count_kv": 4})


def test_queries_of_mistral_4_grow_behind_the_original_context() -> None:
    keys: dict[str, Any] = {"attention.kv_lora_rank": 16, "attention.q_lora_rank": 12}
    keys |= {"rope.dimension_count": 4, "attention.key_length_mla": 12, "attention.value_length_mla": 6}
    keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "attention.temperature_scale": 0.2}
    keys |= {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.1}
    keys |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    assert plain("mistral4", **keys, **{"attention.temperature_length": 16})
    with pytest.raises(UnsupportedModel, match=r"temperature_length is 4; .* original context of 16"):
        plain("mistral4", **keys, **{"attention.temperature_length": 4})


@pytest.mark.parametrize(
    ("key", "value", "usual"), [("rope.freq_base_swa", 5e3, 1e4), ("rope.dimension_count_swa", 4, 8)]
)
def test_what_layers_with_windows_have_otherwise_is_refused_next_to_no_other_key(
    key: str, value: float, usual: float
) -> None:
    """The others have the format's value where the file does not say it."""
    assert plain("gemma2", **{"attention.sliding_window": 5, key: usual})
    with pytest.raises(UnsupportedModel, match=rf"gemma2\.{key} is"):
        plain("gemma2", **{"attention.sliding_window": 5, key: value})


def test_a_list_of_windows_that_the_family_does_not_have_is_refused() -> None:
    key, window = "attention.sliding_window_pattern", {"attention.sliding_window": 4}
    assert plain("phi3", **window, **{key: [True] * 4})
    with pytest.raises(
        UnsupportedModel, match=r"sliding_window_pattern is \[True, .* has a window in layer 1"
    ):
        plain("phi3", **window, **{key: [True, False] * 2})


def test_windows_of_gemma_3_are_where_its_file_has_them() -> None:
    """llama.cpp: every sixth layer is a full one unless the file counts otherwise; none has a window else."""

    def windows_of(**keys: Any) -> list[int | None]:
        spec = plain("gemma3", **{"rope.freq_base": 1e6, "attention.key_length": 8, **keys})
        return [mixer.window for mixer in spec.mixers_of(AttentionSpec)]

    window = {"attention.sliding_window": 5}
    assert windows_of(**window) == [5] * 4
    assert windows_of(**window, **{"attention.sliding_window_pattern": 2}) == [5, None, 5, None]
    assert (
        windows_of(**window, **{"attention.sliding_window_pattern": [True, False, False, True]})[1:3]
        == [None] * 2
    )
    assert windows_of() == [None] * 4
    assert rope_of("gemma3", **{"rope.freq_base": 1e6, "attention.key_length": 8}).theta == 1e6
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping = 2"):  # neither reference applies it
        windows_of(**window, attn_logit_softcapping=2.0)


def test_a_file_without_a_base_of_positions_has_that_of_the_format() -> None:
    """Mixtral's own is a million; llama.cpp takes 10,000 for every architecture."""
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    assert rope_of("llama", **experts).theta == 1e4
    assert rope_of("llama", **experts, **{"rope.freq_base": 1e6}).theta == 1e6


def rope_of(arch: str, **keys: Any) -> RopeSpec:
    found = next(plain(arch, **keys).mixers_of(AttentionSpec)).rope
    assert found
    return found


def test_a_factor_without_a_kind_stretches_positions_evenly() -> None:
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        assert rope_of("qwen2", **{key: 4.0}).scaling == {"rope_type": "linear", "factor": 4.0}
    assert not rope_of("qwen2", **{"rope.scaling.factor": 1.0}).scaling


def test_halves_turn_in_files_of_glm_4_that_see() -> None:
    assert rope_of("glm4").interleaved
    assert not rope_of("glm4", **{"rope.dimension_sections": [2, 1, 1, 0]}).interleaved
    assert rope_of("glm4", **{"rope.dimension_sections": [0, 0, 0, 0]}).interleaved


def test_models_with_tokens_that_see_later_ones() -> None:
    assert not plain("llama-embed").causal
    assert not plain("qwen2", **{"attention.causal": False}).causal
    assert plain("qwen2", **{"attention.causal": True}).causal
    spec = plain("gemma-embedding", **{"attention.key_length": 8, "attention.sliding_window": 6})
    assert {mixer.window for mixer in spec.mixers_of(AttentionSpec)} == {4}
    assert not spec.causal


def test_a_baichuan_of_40_layers_has_a_bias_for_each_distance() -> None:
    large = plain("baichuan", block_count=40)
    assert {m.rope for m in large.mixers_of(AttentionSpec)} == {None}
    assert {m.slopes for m in large.mixers_of(AttentionSpec)} == {spread_slopes(4)}
    assert rope_of("baichuan", block_count=32).interleaved


HOSTILE = (
    -1,
    0,
    2**31,
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    True,
    "x",
    "",
    [],
    [1, 2],
    [[1]],
    [-1] * 3,
    None,
)


def damaged(metadata: Mapping[str, Any], turns: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    keys = [key for key in metadata if key.split(".")[0] == metadata["general.architecture"]]
    for key, value in itertools.product(keys, turns.sample(HOSTILE, 4)):
        yield f"{key} = {value!r}", {**metadata, key: value}
    for key in keys:
        yield f"without {key}", {k: v for k, v in metadata.items() if k != key}


NEW = (
    "mimo_v2_flash",
    "step3p5",
    "bailing_v2",
    "ling3",
    "dots3_note",
    "hy_v4",
    "minimax_m3",
    "minicpm",
    "qwen1",
    "mistral4",
    "muse_glimmer",
)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "embedding_length"])
def test_a_key_that_is_absent_is_named_with_what_to_do(key: str) -> None:
    metadata = metadata_of("qwen3", **{"attention.key_length": 8})
    del metadata[f"qwen3.{key}"]
    file = Memory({"token_embd.weight": torch.zeros(97, 32)})
    said = rf"^the GGUF metadata has no qwen3\.{key}, .* convert .* --set (\w+)=VALUE$"
    with pytest.raises(IncompleteConfig, match=said) as error:
        resolved(file, gguf=metadata)
    given = re.fullmatch(said, str(error.value))
    assert given is not None
    number = metadata_of("qwen3")[f"qwen3.{key}"]
    assert resolved(file, gguf=metadata, overrides=[f"{given[1]}={number}"]).spec.hidden_size == 32


def test_a_count_that_is_too_large_may_be_corrected() -> None:
    metadata = metadata_of("qwen3", **{"attention.key_length": 8, "attention.head_count_kv": 1 << 31})
    file = Memory({"token_embd.weight": torch.zeros(97, 32)})
    said = r"num_key_value_heads = 2147483648; .* \(--set num_key_value_heads=… corrects it\)"
    with pytest.raises(UnsupportedModel, match=said):
        resolved(file, gguf=metadata)
    found = resolved(file, gguf=metadata, overrides=["num_key_value_heads=2"])
    assert [m.num_kv_heads for m in found.spec.mixers_of(AttentionSpec)] == [2] * len(found.spec.layers)
    assert found.provenance["num_key_value_heads"] == "--set"


def test_a_key_may_be_set_where_the_model_or_the_code_of_its_architecture_reads_it() -> None:
    file, metadata = Memory({"token_embd.weight": torch.zeros(97, 32)}), metadata_of("qwen3")
    assert resolved(file, gguf=metadata, overrides=["norm_eps=0.125"]).spec.norm.eps == 0.125
    with pytest.raises(ConfigError, match="--set mamba_d_ssm=…: this model, of the family qwen3, does not"):
        resolved(file, gguf=metadata, overrides=["mamba_d_ssm=64"])
    sizes = {"inner_size": 64, "time_step_rank": 4, "group_count": 2, "state_size": 8, "conv_kernel": 4}
    own = {f"ssm.{key}": size for key, size in sizes.items()}
    metadata = metadata_of("qwen3next", **own, **{"attention.key_length": 8})
    file["blk.0.ssm_a"] = torch.zeros(4)
    for said, dim in ((), 16), (["mamba_d_ssm=128"], 32):
        mixers = resolved(file, gguf=metadata, overrides=said).spec.mixers_of(DeltaNetSpec)
        assert {mixer.value_dim for mixer in mixers} == {dim}


def test_a_key_of_one_architecture_alone_is_named() -> None:
    with pytest.raises(
        IncompleteConfig, match=r"no glm-dsa\.rope\.dimension_count, which a model of glm-dsa"
    ):
        plain("glm-dsa")
    with pytest.raises(UnsupportedModel, match=r"has no general\.architecture, .* no model"):
        resolved(Memory(), gguf={})


@pytest.mark.parametrize("name", NEW)
def test_hostile_numbers_are_typed_errors_or_models(name: str) -> None:
    """Never another exception; a value that is taken gives a spec without numbers that no model has."""
    header = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    shapes = {}
    for theirs, (_, _, shape, layers) in header["tensors"].items():
        shapes |= {theirs.replace("{i}", str(i)): tuple(shape) for i in layers or [0]}
    file = Memory({n: torch.zeros(1).expand(shape) for n, shape in shapes.items()})
    lengths, said = [], set[str]()
    for damage, metadata in damaged(header["metadata"], random.Random(name)):
        try:
            resolved(file, gguf=metadata)
        except PlaitError as error:
            lengths.append(len(str(error)))
            said |= {f"{damage}: {error}"} if damage.startswith("without") else set()
    assert len(lengths) > 20
    assert max(lengths) < 2500
    assert not [line for line in said if "cannot be those of a model" in line]


def llama4(**keys: Any) -> Any:
    sizes = {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 8}
    more = {"interleave_moe_layer_step": 1, "rope.freq_base": 5e5}
    return plain("llama4", **{**sizes, **more, **keys, "context_length": 32_768})


def test_a_window_of_llama4_is_its_chunks_or_none() -> None:
    key = "attention.sliding_window"
    usual = llama4()
    assert [a.chunk for a in usual.mixers_of(AttentionSpec)] == [8192, 8192, 8192, None]
    assert llama4(**{key: 8192}) == usual
    whole = [*llama4(**{key: 0}).mixers_of(AttentionSpec)]
    assert all(a.rope and not a.window and not a.chunk and not a.temperature for a in whole)
    for size in (4096, 65_536):
        with pytest.raises(UnsupportedModel, match=rf"llama4\.{key} is {size}; known of Llama 4: 0 and 8192"):
            llama4(**{key: size})
