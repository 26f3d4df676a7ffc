"""Options of vLLM and llama.cpp that Plait lacks: what they are called here, or why there is no such option.

Only errors read this. A command line that was written for another engine is refused, never translated:
names may be alike where meanings are not, and a default that was set there may be none here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Names elsewhere -> the option here.
OPTIONS = {
    "-c --ctx-size --context-length": "--max-model-len",
    "-np --parallel": "--max-num-seqs",
    "-b --batch-size -ub --ubatch-size": "--max-num-batched-tokens",
    "-n --predict --n-predict": "--max-tokens",
    "-t --threads-batch -tb": "--threads",
    "-a --alias": "--served-model-name",
    "-s": "--seed",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-ctk --cache-type-k -ctv --cache-type-v": "--kv-dtype",
    "-md --model-draft --draft-model -hfd --speculative-config --speculative-model": "--speculate",
    "--draft --draft-max --draft-n --num-speculative-tokens": "--num-draft-tokens",
    "--chat-template-file": "--chat-template",
    "--reasoning-format": "--reasoning-parser",
    "--override-kv --hf-overrides": "--set",
    "-dev": "--device",
    "--enable-expert-parallel": "--expert-parallel",
    "--ssl-certfile --ssl-cert-file": "--tls-cert",
    "--ssl-keyfile --ssl-key-file": "--tls-key",
    "--allowed-origins": "--cors-origin",
    "--api-prefix": "--root-path",
    "--uvicorn-log-level --disable-log-requests": "--log-level",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--tokenizer": "--vocab",
    "--swap-space": "--swap-memory",
    "--lora-modules --enable-lora": "--lora",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--keepalive": "--keep-alive",
}
# What has no option here, and why.
NEEDLESS = {
    "-ngl --gpu-layers --n-gpu-layers": "a model is on one device as a whole: --device, or --cpu",
    "-fa --flash-attn": "attention is always of this kind",
    "--jinja --no-jinja": "chat templates are always run",
    "-cb --cont-batching --enable-chunked-prefill": "it is always on",
    "--embedding --embeddings --rerank --reranking --metrics --slots": "its paths are always served",
    "--enable-auto-tool-choice": "tools are always served; --tool-call-parser names a format",
    "--trust-remote-code": "code of a checkpoint is never run; --plugin loads code that you name",
    "-hf -hfr --hf-repo --revision": "the model's name has it: org/name:Q4_K_M, org/name@REVISION",
    "--mlock --no-mmap --load-format": "the files decide how weights are read",
    "--quantization": "the files say how weights are stored; --quantize encodes plain ones",
    "-ts --tensor-split -sm --split-mode -pp --pipeline-parallel-size": "--tp divides a model among ranks",
    "--cpu-offload-gb": "a model is on one device as a whole: --device, or --cpu",
    "--enforce-eager --max-seq-len-to-capture --cudagraph-capture-sizes": "graphs are captured by need",
    "-f --file": "pipe the file in",
    "--temp --temperature --top-k --top-p --min-p --seed --max-tokens -n --predict --n-predict": (
        "requests have it, and generation_config.json of the model has defaults"
    ),
    "--data-parallel-size -dp": "`plait cluster serve --replicas N` runs several engines",
}


def find_argument(name: str, written: Sequence[str]) -> str:
    """The option that a parser met as `name`: of -ngl it reads letters one by one, and knows no -n."""
    is_short = len(name) == 2
    shorts = (one for one in written if is_short and one[:1] == "-" != one[1:2] and name[1] in one)
    return next(shorts, name).partition("=")[0]


def find_hint(name: str, known: Collection[str]) -> str:
    """The end of an error about another engine's option, or "". known: the options that the command has."""
    meant = next((option for names, option in OPTIONS.items() if name in names.split()), None)
    why = next((why for names, why in NEEDLESS.items() if name in names.split()), None)
    return f"; here it is {meant}" if meant in known else f": {why}" if why else ""
