"""Every family behind HTTP: the greedy tokens of /v1/completions are those that transformers would choose.

Prompts of several lengths arrive together at a server with small steps. So prompts are computed in chunks
next to the decodes of others, and slots and blocks are used again. Sequences run once with memory for all,
and once with so few blocks that some are put back and computed again. A third run has blocks that native
kernels know, so that every step is a recorded one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from plait.config import EngineConfig
from plait.engine.memory_plan import size_state
from plait.frontend.output_stream import OutputStream
from plait.loading.build import Loaded, describe_for_sizing, load
from plait.request import Request
from plait.schedule.plan import Chunk, SamplingBatch, StepPlan, Ticket
from tests.families import tiny, tiny_plain
from tests.server.conftest import Client, serving

LONGEST, REPLY, BLOCK = 32, 12, 4  # the first prompt and its reply are as long as the model may go
LENGTHS = (20, 3, 17, 1, 9, 6)  # two more than may run at once
SMALL_STEPS = dict(
    device="cpu", max_model_len=LONGEST, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=16
)
# Of the 32 blocks that four of the longest need; what is left is too little for the four shortest at once.
SPARED = 20
NATIVE_BLOCK = 16
# Dynamic scaling begins beyond the length that a model was made for, which the loader does not pass unasked.
STRETCHED = {"llama_dynamic": ("max_position_embeddings=32", "original_max_position_embeddings=16")}
# Two logits nearer than the error of float32 sums in another order (see test_parity) may change places. Each
# token is judged after those that were chosen before it, so one such tie says nothing about the others.
# None is known today: the test passes with 0 too.
TIE = 1e-4

# The biases of random weights choose the same token after any prompt.
ALIKE = {
    "gpt1",
    "falcon",
    "falcon_heads",
    "gpt_neo",
    *(n for n in tiny_plain.VARIANTS if n.endswith("_decoder")),
}

Ids = list[int]


@dataclass
class Watched:
    """A loaded model that starts when `arrivals` requests are there, and writes down what it computes."""

    loaded: Loaded
    arrivals: int = len(LENGTHS)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._arrived: list[str] = []
        self._all_here = threading.Event()
        self._submit, self._launch = self.loaded.front.submit, self.loaded.runner.launch
        self.loaded.front.submit = self.submit
        self.loaded.runner.launch = self.launch

    def submit(self, request: Request, interval: int | None = 1) -> OutputStream:
        stream = self._submit(request, interval)
        self._arrived.append(request.id)
        if len(self._arrived) == self.arrivals:
            self._all_here.set()
        return stream

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        assert self._all_here.wait(30)
        self.plans.append(plan)
        return self._launch(plan, sampling)

    @property
    def num_preemptions(self) -> int:
        return self.loaded.front.stats()["num_preemptions"]

    @property
    def num_pieces(self) -> int:
        """Parts of prompts after which no token is chosen yet."""
        return sum(chunk.num_logits == 0 for plan in self.plans for chunk in plan.chunks)

    @property
    def num_mixed(self) -> int:
        """Steps with prompts next to the decodes of others."""
        return sum(len({is_decode(chunk) for chunk in plan.chunks}) == 2 for plan in self.plans)


def is_decode(chunk: Chunk) -> bool:
    return chunk.start > 0 and len(chunk.token_ids) == 1


def random_prompts(vocab_size: int) -> list[Ids]:
    return [torch.randint(1, vocab_size, (length,)).tolist() for length in LENGTHS]


def less_memory(loaded: Loaded) -> int | None:
    """Bytes of state in which some sequence must wait for another's blocks; None if none can have to."""
    growing = [size for size in loaded.sizing.groups if size.group.window is None]
    if not growing:
        return None
    facts, limit = describe_for_sizing(loaded.runner.decoder, loaded.target), loaded.sizing.nbytes
    while True:  # snapshots give way as well, so the limit is looked for
        limit -= growing[0].nbytes_per_block
        config = replace(loaded.config, memory_limit=limit)
        sizing = size_state(facts, config, free_memory=limit)
        (left, *_) = (size for size in sizing.groups if size.group.window is None)
        if left.num_blocks <= growing[0].num_blocks - SPARED:
            return limit


# One family for each kind of memory, mixer and branch; the others are slow, and their logits are compared.
SERVED = {
    *("llama", "gemma3", "deepseek_v3", "falcon_h1", "lfm2", "kimi_linear", "recurrent_gemma"),
}


def named() -> list[Any]:
    assert set(tiny.VARIANTS) >= SERVED
    return [name if name in SERVED else pytest.param(name, marks=pytest.mark.slow) for name in tiny.VARIANTS]


def in_one_request(client: Client, prompts: Sequence[Ids]) -> list[Ids]:
    """Replies to a list of prompts, whole."""
    answer = client.complete(prompts, max_tokens=REPLY, ignore_eos=True, return_token_ids=True)
    assert answer.status == 200, answer.body
    return [choice["token_ids"] for choice in answer.json["choices"]]


def streamed(client: Client, prompts: Sequence[Ids]) -> list[Ids]:
    """Replies to prompts that are sent side by side, each in chunks."""

    def reply(prompt: Ids) -> Ids:
        options: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "stream": True}
        answer = client.complete(prompt, max_tokens=REPLY, **options)
        assert answer.status == 200, answer.body
        choices = [event["choices"][0] for event in answer.events]
        assert choices[-1]["finish_reason"] == "length"
        assert len(choices) > 1
        return [token for choice in choices for token in choice["token_ids"]]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(reply, prompts))


@contextlib.contextmanager
def watched(folder: Path, **options: Any) -> Iterator[tuple[Watched, Client]]:
    """The model of a folder behind a server in this process."""
    seen = Watched(load(str(folder), EngineConfig(**{**SMALL_STEPS, **options})))
    with serving(seen.loaded.front) as client:
        yield seen, client


@torch.inference_mode()
def after_each(oracle: torch.nn.Module, texts: Sequence[Ids]) -> list[Tensor]:
    """Logits [tokens, vocab] of texts, computed at once.

    All are filled up to LONGEST tokens, which no earlier token can see. Where the position's angles depend on
    a length, transformers takes that of its input, and Plait the longest that it serves.
    """
    rows = torch.tensor([text + [0] * (LONGEST - len(text)) for text in texts])
    logits = oracle(rows, use_cache=False).logits
    return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]


def assert_chosen(prompt: Ids, reply: Ids, logits: Tensor) -> None:
    """Every token of the reply has the largest logit after all those before it."""
    assert len(reply) == REPLY
    after = logits[len(prompt) - 1 : -1]
    found = after.gather(1, torch.tensor(reply)[:, None])[:, 0]
    wrong = (after.max(-1).values - found) > TIE
    assert not wrong.any(), f"{reply} instead of {after.argmax(-1).tolist()} after {prompt}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", named())
def test_greedy_tokens_over_http_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path)
    prompts, changes = random_prompts(tiny.SIZES["vocab_size"]), STRETCHED.get(name, ())
    with watched(tmp_path, set=changes) as (roomy, client):
        whole = in_one_request(client, prompts)
    limit = less_memory(roomy.loaded)
    with watched(tmp_path, set=changes, memory_limit=limit) as (tight, client):
        pieces = streamed(client, prompts)
    with watched(tmp_path, set=changes, block_size=NATIVE_BLOCK) as (native, client):
        recorded = streamed(client, prompts)
    assert native.loaded.runner.is_recorded, native.loaded.runner.step_kind
    eager = {"dtype": torch.float32, "attn_implementation": tiny.VARIANTS[name].attention}
    made = getattr(transformers, tiny.VARIANTS[name].model or "AutoModelForCausalLM")
    oracle = made.from_pretrained(tmp_path, **eager).eval()
    if name.startswith("zaya"):  # transformers overwrites balancing biases after it has read them
        oracle.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for replies in (whole, pieces, recorded):
        texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
        for prompt, reply, logits in zip(prompts, replies, after_each(oracle, texts), strict=True):
            assert_chosen(prompt, reply, logits)
    assert len({tuple(reply) for reply in whole}) > 1 or name in ALIKE
    assert all(seen.num_pieces and seen.num_mixed for seen in (roomy, tight, native))
    assert roomy.num_preemptions == 0
    assert (tight.num_preemptions > 0) == (limit is not None)


def test_greedy_tokens_of_the_nano_hybrid_follow_its_logits(nano_hybrid: Path) -> None:
    with watched(nano_hybrid) as (seen, client):
        prompts = random_prompts(seen.loaded.front.spec.vocab_size)
        for prompt, reply in zip(prompts, streamed(client, prompts), strict=True):
            assert_chosen(prompt, reply, seen.loaded.runner.logits(prompt + reply, LONGEST))
