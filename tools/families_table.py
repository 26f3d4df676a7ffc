"""The tables of families and of storage formats in docs/families.md, from what the tests run.

`python tools/families_table.py` prints them; `--write` puts them into that page between their markers. A
family without a row, or a row without a family, is an error, so that neither can be forgotten.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
sys.path.insert(0, str(ROOT))

BERTS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
BARTS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"),
    *("plbart", "trocr"),
)
# What a row is called, its layers, and the families (as `families.common.registry` has them) it stands for.
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Llama 2, 3, 3.x, SmolLM2, CodeLlama", "GQA, MLP", ("llama",)),
    ("Mistral, Nemo, Ministral 8B, Devstral", "GQA, perhaps with windows, MLP", ("mistral",)),
    ("DiffLlama", "differential GQA, MLP", ("diffllama",)),
    ("Llama 4 (text)", "GQA, in chunks and without positions, MoE", ("llama4_text",)),
    ("Seed-OSS, CWM, InternLM 3 · AFM 4.5B · Helium", "GQA, MLP", ("seed_oss", "cwm", "arcee", "helium")),
    ("ERNIE 4.5 · ERNIE 4.5 MoE", "GQA, MLP · MoE", ("ernie4_5", "ernie4_5_moe")),
    ("ERNIE 4.5 VL (text)", "GQA, MoE", ("ernie4_5_vl_moe_text",)),
    ("PaddleOCR-VL, Hunyuan-OCR (text)", "GQA, MLP", ("paddleocr_vl_text", "hunyuan_vl_text")),
    ("Cosmos 3 Edge (text)", "GQA, MLP", ("cosmos3_edge_text",)),
    ("Molmo 1, 2 (text)", "GQA, MLP", ("molmo", "molmo2_text")),
    ("EXAONE 4", "GQA, local and global, MLP", ("exaone4",)),
    ("K-EXAONE · Flint · Aria (text)", "GQA, local and global, MoE", ("exaone_moe", "flint", "aria_text")),
    ("IQuest Q1", "GQA with learned keys, local and global, MoE", ("iquest_q1",)),
    ("Domyn Edge", "GQA, local and global, partly without positions, MLP", ("domyn_edge",)),
    ("Nemotron 3, 4, Minitron · StableLM 2", "GQA, MLP", ("nemotron", "stablelm")),
    ("Mixtral", "GQA, MoE", ("mixtral",)),
    ("Snowflake Arctic", "GQA and MoE side by side, MLP", ("arctic",)),
    ("Grok 1, 2 (2 up to 1,024 tokens)", "GQA, MoE, MLP", ("grok-1",)),
    ("SmallThinker", "GQA, local and global, MoE chosen before it", ("smallthinker",)),
    ("Grove MoE", "GQA, MoE with experts in common", ("grove_moe",)),
    ("Maple", "GQA, local and global, MoE", ("maple",)),
    ("PLaMo 1", "GQA and MLP side by side", ("plamo",)),
    ("Talkie", "MHA, MLP, embeddings added behind every layer", ("talkie",)),
    ("Qwen2, Qwen2.5, Qwen3", "GQA, MLP", ("qwen2", "qwen3")),
    ("SDAR (block diffusion)", "GQA within blocks, MLP", ("sdar",)),
    ("SDAR-MoE (block diffusion)", "GQA within blocks, MoE", ("sdar_moe",)),
    ("LLaDA 2, 2.1 (block diffusion)", "GQA within blocks, MoE", ("llada2_moe",)),
    ("DiffusionGemma (block diffusion)", "GQA, local and global, MLP and MoE", ("diffusion_gemma",)),
    ("Qwen2-VL, 2.5-VL, 2.5-Omni, Qwen3-VL (text)", "GQA, MLP", ("qwen2_vl_text", "qwen3_vl_text")),
    ("Qwen2-MoE, Qwen3-MoE", "GQA, MoE", ("qwen2_moe", "qwen3_moe")),
    ("Qwen3-VL-MoE, Qwen3-Omni (text)", "GQA, MoE", ("qwen3_vl_moe_text", "qwen3_omni_moe_text")),
    ("Qwen3-Next", "gated DeltaNet, gated GQA, MoE", ("qwen3_next",)),
    ("Qwen3.5, Qwen3.5-MoE", "gated DeltaNet, gated GQA, MLP or MoE", ("qwen3_5_text", "qwen3_5_moe_text")),
    (
        "Qwen3.8-Flash-Next (Qwen4-Exp)",
        "gated DeltaNet, gated GQA over chosen blocks, MoE, n-grams, gated residual streams",
        ("qwen4_exp_text",),
    ),
    ("Gemma 1, VaultGemma", "GQA, local and global, MLP", ("gemma", "vaultgemma")),
    ("Gemma 2, Gemma 3 (text)", "GQA, local and global, MLP", ("gemma2", "gemma3_text")),
    ("Rnj-1", "GQA, in chunks and global, MLP", ("rnj1",)),
    ("Gemma 4 (text)", "GQA, local and global, MLP, MoE", ("gemma4_text", "gemma4_unified_text")),
    ("xLSTM 7B", "mLSTM, MLP", ("xlstm",)),
    ("Gemma 3n (text)", "GQA, local and global, MLP, four residual streams", ("gemma3n_text",)),
    ("RecurrentGemma", "RG-LRU, local GQA, MLP", ("recurrent_gemma",)),
    ("DeepSeek-V2, V3, R1, Kimi-K2, text of K2.5", "MLA, MoE", ("deepseek_v2", "deepseek_v3")),
    ("DeepSeek-VL2 (text)", "MLA or GQA, MoE", ("deepseek_vl_v2",)),
    ("DeepSeek-V3.2 · GLM-5", "MLA with an indexer, MoE", ("deepseek_v32", "glm_moe_dsa")),
    (
        "GLM-5.3-Flash (text)",
        "Kimi delta attention, MLA to chosen pools of keys, MoE, mixed residual streams",
        ("glm5_next",),
    ),
    ("DeepSeek-V4", "attention to compressed keys, MoE, mixed residual streams", ("deepseek_v4",)),
    (
        "DeepSeek-V4.1 (text)",
        "attention to compressed keys that layers share, MoE, mixed residual streams, n-grams",
        ("deepseek_v41",),
    ),
    ("Hy4", "gated MLA with an indexer, MoE, residual streams", ("hy_v4",)),
    ("Hy4-VL (text)", "gated MLA with an indexer, MoE, residual streams", ("hy_v4_vl_text",)),
    ("dots3 note (text)", "gated MLA, local or with an indexer, MoE", ("dots3_note_text",)),
    ("MiniMax-M3 (text)", "GQA over chosen blocks, MoE", ("minimax_m3_vl_text",)),
    ("Alice AI", "Kimi delta attention, gated GQA, MoE, attention residuals", ("alice_ai",)),
    ("GigaChat 3.5", "gated DeltaNet, gated MLA, MoE, norms with gates", ("gigachat3_5",)),
    ("LongCat-Flash, Flash-Lite", "MLA, MLP, MoE with identities, n-grams", ("longcat_flash",)),
    ("Step 1", "GQA with a bias of the root of each distance, MLP", ("step1",)),
    ("Step 3 (text)", "MQA with queries of a low rank, MoE", ("step3_text",)),
    ("K2 Horizon, K2-V2 (xLLM)", "gated GQA with a mixture of values, MoE · GQA, MLP", ("k2_horizon",)),
    ("GLM-4.7-Flash · Youtu-LLM", "MLA, MoE · MLP", ("glm4_moe_lite", "youtu")),
    ("A.X K1", "MLA, MoE", ("axk1",)),
    ("A.X K2", "gated MLA with an indexer, MoE", ("axk2",)),
    ("Beam", "gated GQA, local and global, MoE", ("beam",)),
    ("Ministral 3, Devstral 2", "GQA, queries that grow with position, MLP", ("ministral3",)),
    ("Mistral Small 4", "MLA, queries that grow with position, MoE", ("mistral4",)),
    ("Mistral Large 4 (text)", "MLA with indexers over shared latents, MoE", ("mistral_large4_text",)),
    ("Muse Glimmer (text)", "gated GQA, local and global, MLP", ("muse_glimmer",)),
    ("Muse Spark (text)", "gated GQA, local and global, MoE, gated residuals", ("muse_spark_text",)),
    ("HRM-Text", "gated attention and MLP in two stacks in turns", ("hrm_text",)),
    (
        "Dory",
        "gated GQA, local and global, and MLP over states of one length, in loops",
        ("dory",),
    ),
    ("Maincoder", "GQA, MLP", ("maincoder",)),
    ("Nemotron Super 49B, Ultra 253B · DeciLM", "GQA, MLP, either left out", ("nemotron-nas",)),
    ("Apertus, Apertus 1.5 (text) · Jais 2", "GQA, MLP", ("apertus", "jais2")),
    ("Hunyuan dense · A13B", "GQA, MLP · MoE", ("hunyuan_v1_dense", "hunyuan_v1_moe")),
    ("AFMoE (Trinity)", "gated GQA, local and global, MoE", ("afmoe",)),
    ("Hy3 · Mellum 2", "GQA, local and global, MoE", ("hy_v3", "mellum")),
    ("Step 3.5, text of 3.7", "gated GQA, local and global, MoE", ("step3p5",)),
    ("MiMo-V2.5, V2.6 (text)", "GQA with sinks, local and global, MoE", ("mimo_v2",)),
    ("MiMo-V2-Flash", "GQA with sinks, local and global, MoE", ("mimo_v2_flash",)),
    ("MiniCPM 1, 2, 4 (4.1 up to 8,191 tokens)", "GQA, MLP", ("minicpm",)),
    ("MiniCPM 3", "MLA, MLP", ("minicpm3",)),
    ("MiniMax-M2 · dots.llm1 · Solar Open", "GQA, MoE", ("minimax_m2", "dots1", "solar_open")),
    ("XVERSE MoE", "GQA, MoE", ("xverse_moe",)),
    ("Kimi-Linear", "Kimi delta attention, MLA, MoE", ("kimi_linear",)),
    (
        "Kimi-K3 (text)",
        "Kimi delta attention, gated MLA, latent MoE, attention residuals",
        ("kimi_k3",),
    ),
    (
        "Inkling (text)",
        "GQA with biases of distances, local and global, short convolutions, MoE",
        ("inkling_text",),
    ),
    (
        "Inkling 2 (text)",
        "GQA with biases of distances, sinks of each token, local and global, short convolutions, MoE, "
        "attention residuals",
        ("inkling2_text",),
    ),
    (
        "Inkling 2 Mini (text)",
        "as Inkling 2; middle layers run in passes, with messages of the pass before",
        ("inkling2_loop_text",),
    ),
    ("MiniCPM-SALA (up to 8,191 tokens)", "lightning attention, gated GQA, MLP", ("minicpm_sala",)),
    ("Ling 3", "Kimi delta attention, MLA, MoE", ("bailing_hybrid",)),
    ("Ling 2.5, Ring 2.5", "lightning attention, MLA, MoE", ("bailing_moe_linear",)),
    ("openPangu Ultra MoE", "MLA, MoE", ("pangu_ultra_moe",)),
    ("Param 2", "GQA, MoE", ("param2moe",)),
    ("Ling 1, 2 · DeepSeek-MoE", "GQA, MoE", ("bailing_moe", "bailing_moe_v2", "deepseek")),
    ("DeepSeek-OCR 2 (text)", "GQA, MoE", ("deepseek_ocr2_text",)),
    ("Sarvam 30B · 105B", "GQA · MLA, MoE", ("sarvam_moe", "sarvam_mla")),
    ("Lara 4 Mini", "gated DeltaNet, GQA, local and global, MoE", ("lara_mini",)),
    ("MiniMax-01, M1", "lightning attention, GQA, MoE", ("minimax",)),
    ("gpt-oss", "GQA with sinks, local and global, MoE", ("gpt_oss",)),
    ("OLMo 1, 2, 3", "GQA, local and global, MLP", ("olmo", "olmo2", "olmo3")),
    ("OLMoE, FlexOlmo", "GQA, MoE", ("olmoe", "flex_olmo")),
    ("OLMo-Hybrid", "gated DeltaNet, GQA, MLP", ("olmo_hybrid",)),
    ("Phi 1, 2 · Phi 3, 3.5, 4", "GQA and MLP side by side · in turn", ("phi", "phi3", "phi4_multimodal")),
    ("GPT-NeoX, Pythia · GPT-J · CodeGen", "GQA and MLP side by side", ("gpt_neox", "gptj", "codegen")),
    ("GPT-2, StarCoder 1 · GPT-Neo", "MHA, MQA, local and global, MLP", ("gpt2", "gpt_bigcode", "gpt_neo")),
    ("OPT, Galactica", "MHA, MLP", ("opt",)),
    ("BioGPT, XGLM, CTRL, GPT-1", "MHA, MLP", ("biogpt", "xglm", "ctrl", "openai-gpt")),
    ("Persimmon, Fuyu (text) · GPT-NeoX Japanese", "MHA, MLP", ("persimmon", "gpt_neox_japanese")),
    ("nanochat", "GQA, MLP", ("nanochat",)),
    ("EXAONE 3 · InternLM 2 · Qwen 1", "GQA, MHA, MLP", ("exaone", "internlm2", "qwen")),
    ("Orion · openPangu Embedded, XVERSE", "GQA, MLP", ("orion", "PanguEmbedded")),
    ("InternLM 1, Aquila, Skywork, Yi, as first published", "GQA, MLP", ("Yi",)),
    ("MiMo 7B", "GQA, MLP", ("mimo",)),
    ("MiniCPM-V, MiniCPM-o (text)", "GQA, MLP", ("minicpmv",)),
    ("CodeShell", "GQA, MLP", ("codeshell",)),
    ("ChatGLM 2, 3, GLM-4 9B of 2024 · Baichuan 1, 2", "GQA · MHA, ALiBi, MLP", ("chatglm", "baichuan")),
    ("TeleChat 1, 2, 3 · TeleFLM (FLM-2)", "GQA, MHA, MLP", ("telechat", "telechat3", "TeleFLM")),
    ("Solar Pro", "GQA, MLP, connections over several layers", ("solar",)),
    ("Jais 1 · Refact", "MHA, MQA with ALiBi, MLP", ("jais", "gpt_refact")),
    ("Ouro", "MHA, MLP · in several rounds", ("ouro",)),
    (
        "IQuest-Coder-V1 · its loop",
        "GQA, MLP · in two rounds, the second over keys of both",
        ("iquestcoder", "iquestloopcoder"),
    ),
    ("OpenELM · Nanbeige 4.2", "GQA, MLP · in several rounds", ("openelm", "nanbeige")),
    ("PLM", "MLA, MLP", ("plm",)),
    ("Spark X2.5", "gated GQA, local and global, MLP", ("spark2_5",)),
    ("Falcon, Falcon 2 · Falcon-RW", "GQA and MLP side by side · in turn, ALiBi", ("falcon",)),
    ("BLOOM, BLOOMZ · MPT", "MHA with ALiBi, MLP", ("bloom", "mpt")),
    ("DBRX · Phi-3.5-MoE", "GQA, MoE", ("dbrx", "phimoe")),
    ("BitNet b1.58 2B-4T, as bfloat16", "GQA and MLP with norms within", ("bitnet",)),
    ("Llama 3.2 Vision, Emu3 (text)", "GQA, MLP", ("mllama_text_model", "emu3_text_model")),
    ("Chameleon (text)", "GQA, MLP", ("chameleon",)),
    ("ModernBERT as a decoder (Ettin)", "MHA, local and global, MLP", ("modernbert-decoder",)),
    ("Decoders of BERT and its kin (`is_decoder`)", "MHA, MLP", BERTS),
    ("Decoders of BART and its kin, without encoders", "MHA, MLP", BARTS),
    ("SmolLM3", "GQA, partly without positions, MLP", ("smollm3",)),
    ("StarCoder2", "GQA, MLP", ("starcoder2",)),
    ("Command R, R+ · R7B, A", "GQA and MLP side by side", ("cohere", "cohere2")),
    ("Command A with experts", "GQA and MoE side by side", ("cohere2_moe",)),
    ("North Micro (text)", "GQA and MLP side by side", ("cohere_compass_text",)),
    ("GLM-4 · GLM-4.5, 4.6, 4.7, text of 4.5V", "GQA, MLP · MoE", ("glm", "glm4", "glm4_moe")),
    ("GLM-4.1V, 4.6V-Flash, GLM-OCR (text)", "GQA, MLP", ("glm4v_text",)),
    ("Granite 3 dense, MoE, text of 4 Vision", "GQA, MLP · MoE", ("granite", "granitemoe")),
    ("Granite Docling (text)", "GQA, MLP", ("granite_docling_text",)),
    ("Granite with windows, MoE", "GQA with sinks, MLP · MoE", ("granite_swa", "granitemoe_swa")),
    ("HyperCLOVA X SEED Think", "GQA, MLP", ("hyperclovax",)),
    ("Granite 4", "Mamba2, GQA, MLP or MoE", ("granitemoehybrid",)),
    ("Mamba, Falcon-Mamba", "Mamba1", ("mamba", "falcon_mamba")),
    ("Mamba2, Codestral Mamba", "Mamba2", ("mamba2", "MambaLMHeadModel")),
    ("Jamba", "Mamba1, GQA, MLP or MoE", ("jamba",)),
    ("Bamba", "Mamba2, GQA, MLP", ("bamba",)),
    ("Zamba 1", "Mamba1, shared attention", ("zamba",)),
    ("Zamba2", "Mamba2, shared attention", ("zamba2",)),
    ("Nemotron-H, Nemotron 3 Nano, Super, Puzzle", "Mamba2, GQA, MLP or MoE", ("nemotron_h",)),
    ("Falcon-H1", "Mamba2 and GQA side by side, MLP", ("falcon_h1",)),
    ("PLaMo 2 · PLaMo 3", "Mamba2-like, GQA, MLP · GQA, local and global, MLP", ("plamo2", "plamo3")),
    ("JetMoe", "mixture of attention heads, MoE", ("jetmoe",)),
    ("Hymba", "Mamba1 and GQA in one, local and global, MLP", ("hymba",)),
    ("Phi-4-mini-flash (SambaY)", "Mamba1, memory units, differential GQA, MLP", ("phi4flash",)),
    (
        "RWKV-4 · RWKV-5, RWKV-6 · RWKV-7 · as GGUF QRWKV6, ARWKV-7",
        "WKV by channel · by head · generalized delta rule, channel mixing or MLP",
        ("rwkv", "rwkv5", "rwkv6", "RWKV6ForCausalLM", "rwkv7"),
    ),
    ("Jet-Nemotron", "JetBlock, GQA, local and global, MLP", ("jet_nemotron",)),
    ("Doge (dense, up to keep_window_size)", "attention with a bias for each key, MLP", ("doge",)),
    ("ZAYA1", "compressed convolutional attention, MoE", ("zaya",)),
    ("LFM2, LFM2-MoE", "short convolutions, GQA, MLP or MoE", ("lfm2", "lfm2_moe")),
    ("LFM3", "short convolutions, gated GQA, local and global, MLP", ("lfm3",)),
    ("Laguna", "gated GQA, local and global, MoE", ("laguna",)),
    ("Kolibri 1", "GQA, local and global, MoE", ("kolibri1",)),
    ("oxidizr hybrids", "Mamba1, 2, 3, MLA, MoE, GQA in any order", ("oxidizr",)),
)  # fmt: skip
# Families with another oracle than transformers: where their tests are.
OTHER_TESTS: Mapping[str, tuple[bool, bool, bool]] = {  # Hugging Face files, GGUF, names only
    "deepseek_vl_v2": (True, False, False),  # test_wrappers
    "plamo2": (True, True, True),  # test_plamo2, test_detect
    "bailing_moe_linear": (True, False, False),  # test_ling
    "bailing_moe": (True, True, False),  # test_ling_moe, gguf/test_recorded
    "bailing_moe_v2": (True, True, False),
    "param2moe": (True, True, False),
    "deepseek": (True, True, False),
    "jet_nemotron": (True, False, False),  # test_jet_nemotron
    "plamo3": (True, True, True),  # test_plamo3
    "kimi_k3": (True, True, False),  # test_kimi_k3, gguf/test_recorded
    **dict.fromkeys(("alice_ai", "gigachat3_5"), (True, False, False)),  # test_hybrids
    "minicpm_sala": (True, False, True),  # test_minicpm_sala
    "hymba": (True, False, True),  # test_hymba
    "phi4flash": (True, False, True),  # test_sambay
    "rwkv5": (True, False, False),  # test_rwkv6
    "rwkv6": (True, True, False),
    "RWKV6ForCausalLM": (True, False, True),
    "rwkv7": (True, True, True),  # test_rwkv7
    "mimo_v2": (True, True, False),  # test_mimo, gguf/test_recorded
    "ouro": (True, False, False),  # test_looped
    "pangu_ultra_moe": (True, False, False),  # test_pangu
    "iquestcoder": (True, True, False),
    "iquestloopcoder": (True, False, False),
    "chameleon": (True, True, False),  # test_chameleon
    "MambaLMHeadModel": (True, False, False),  # test_published
    "nemotron-nas": (True, True, False),  # test_nemotron_nas
    "maincoder": (True, True, False),  # gguf/published, gguf/test_recorded
    "oxidizr": (True, False, True),  # test_oxidizr
    "mimo": (True, False, False),  # mtp_oracle
    **dict.fromkeys(("iquest_q1", "domyn_edge", "rnj1", "xverse_moe"), (True, False, False)),  # test_older
    **dict.fromkeys(("Yi", "minicpmv", "molmo"), (True, False, False)),  # gguf/published_kin
    "solar": (True, False, False),  # test_coded
    **dict.fromkeys(  # test_older, test_layouts, gguf/test_recorded
        (
            *("jais", "gpt_refact", "openelm", "plm", "spark2_5", "nanbeige", "minicpm", "exaone"),
            *("internlm2", "qwen", "orion", "PanguEmbedded", "codeshell"),
            *("arctic", "grok-1", "smallthinker", "grove_moe", "maple", "plamo", "talkie"),
            *("chatglm", "baichuan", "telechat", "telechat3", "TeleFLM"),  # test_coded, test_layouts
            *("qwen2_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "paddleocr_vl_text"),  # tiny_inside
            "hunyuan_vl_text",
        ),
        (True, True, False),
    ),
}


# The sections of the page, and what of a row's layers puts it there; the last one has what is left.
RECURRENT = ("Mamba", "delta", "Delta", "lightning", "RG-LRU", "WKV", "mLSTM", "convolution", "JetBlock")
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Recurrent models and hybrids", RECURRENT),
    ("Latent attention", ("MLA",)),
    ("Mixtures of experts", ("MoE",)),
    ("Transformers", ("",)),
)


def family_lines() -> Iterator[str]:
    """The table of families. Raises SystemExit if a family has no row, or a row names none."""
    from plait.families.common.registry import families_by_name

    every = {family.name for family in families_by_name().values()} | {"oxidizr"}
    listed = {name for _, _, names in ROWS for name in names}
    if every != listed:
        raise SystemExit(f"families without a row, or rows without a family: {sorted(every ^ listed)}")
    tested = _tested()
    titles = (title for title, _ in GROUPS)
    for group, rows in zip(titles, _grouped(), strict=True):
        yield from (f"## {group}", "", "| family | layers | Hugging Face | GGUF | names only |")
        yield "|---|---|:---:|:---:|:---:|"
        for title, layers, names in rows:
            signs = (_sign(names, found) for found in tested)
            yield f"| {title} | {layers} | {' | '.join(signs)} |"
        yield ""


def _grouped() -> list[list[tuple[str, str, tuple[str, ...]]]]:
    """The rows of each group, by title. A row is in the first group with a word of its layers."""
    groups: list[list[tuple[str, str, tuple[str, ...]]]] = [[] for _ in GROUPS]
    for row in sorted(ROWS, key=lambda row: row[0].casefold()):
        of = next(i for i, (_, words) in enumerate(GROUPS) if any(word in row[1] for word in words))
        groups[of].append(row)
    return groups


def _tested() -> tuple[set[str], set[str], set[str]]:
    """Families that tests run from Hugging Face files, as GGUF, and without a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from plait.families.common.registry import families_by_name
    from tests.families import tiny, tiny_bare
    from tests.families.gguf.recorded import BASES, NAMES
    from tests.families.gguf.test_config import OLD, VARIANTS
    from tests.families.newer_oracles import DESCRIBED

    types = {config: kind for kind, config in CONFIG_MAPPING_NAMES.items()}

    def family_of(config: str) -> str:
        return families_by_name()[types[config]].name

    hugging = {family_of(v.config) for v in tiny.VARIANTS.values()}
    named = {*VARIANTS, *OLD, *NAMES} - {*BASES, *DESCRIBED, "kimi_k3"}
    files = {family_of(tiny.VARIANTS[name].config) for name in named}
    bare = {family_of(v.config) for v in tiny.VARIANTS.values() if v.bare}
    bare |= {family_of(v.config) for v in tiny_bare.VARIANTS.values()}
    for name, flags in OTHER_TESTS.items():
        for found, flag in zip((hugging, files, bare), flags, strict=True):
            found |= {name} if flag else set()
    return hugging, files, bare


def _sign(names: tuple[str, ...], found: set[str]) -> str:
    """yes, no, or how many of a row's families."""
    there = sum(name in found for name in names)
    return "✓" if there == len(names) else "–" if not there else f"{there} of {len(names)}"


def updated(text: str) -> str:
    """The page with both tables as they are now. Raises SystemExit without the markers."""
    from tools.formats_table import format_lines

    for name, lines in (("families", family_lines()), ("formats", format_lines())):
        block = f"<!-- {name} -->\n" + "\n".join(lines).rstrip() + f"\n<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for the table of {name}, expected 1")
    return text


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(text), encoding="utf-8")
    else:
        from tools.formats_table import format_lines

        print("\n".join([*family_lines(), "", *format_lines()]))


if __name__ == "__main__":
    main()
