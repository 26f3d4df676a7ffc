"""The requests and cells of `plait verify` for samplers: every one of them, guidance and beam search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from plait.config import GIB
from plait.frontend.frontend import Front
from plait.request import SamplingParams
from plait.verify.matrix import FEW, Cell
from plait.verify.prompts import Prompt, VerifyRequest

SAMPLED, TOGETHER = 3, 4  # the turns of their requests, see `Cell.waves`
MOST_TOGETHER = 3  # sequences of a gang
SEED, DRAWN = 5150, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
# A name, and fields of a request. Their token ids are in every vocabulary.
SAMPLERS: Mapping[str, Mapping[str, object]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "DRY": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "smoothing": {"smoothing_factor": 0.4, "smoothing_curve": 1.5},
    "top-k, top-p and min-p": {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "typical-p": {"typical_p": 0.6},
    "XTC": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "an order of its own": {"samplers": ("top_p", "temperature", "xtc"), "xtc_probability": 0.5},
    "biases and bans": {"logit_bias": {1: 4.0, 2: -100.0}, "bad_word_ids": ((1, 1),)},
    "allowed tokens": {"allowed_token_ids": (0, 1, 2, 3, 4)},
}
IN_ORDER = {"mirostat", "dry_multiplier", "bad_word_ids"}  # which need tokens one after the other


def sampler_waves(
    front: Front, prompts: Sequence[Prompt], max_tokens: int, *, is_small: bool = False
) -> Iterator[list[VerifyRequest]]:
    """A request for each sampler, with the prompts in turn; then for each gang, with every prompt.

    No gangs where a step has too few sequences for them, and nothing for a model that is not causal. One that
    fills canvases has neither gangs nor what needs tokens in order.
    `is_small`: samplers that a device has, without those of the host alone, and gangs with one prompt.
    """
    if not front.spec.causal:
        return
    prompts = [front.prepare(prompt, SamplingParams(max_tokens=1)).prompt_token_ids for prompt in prompts]
    wave = [
        _request(front, name, prompts[n % len(prompts)], SAMPLED, {**fields, "seed": SEED + n}, max_tokens)
        for n, (name, fields) in enumerate(SAMPLERS.items())
        if not (front.spec.canvas and IN_ORDER & fields.keys())
    ]
    yield [one for one in wave if not (is_small and one.request.params.needs_chain)]
    if front.max_num_seqs >= MOST_TOGETHER and front.spec.canvas is None:
        yield [
            _request(front, f"{name}, prompt {n}", prompt, TOGETHER, fields, max_tokens)
            for n, prompt in enumerate(prompts[:1] if is_small else prompts, 1)
            for name, fields in _gangs(prompts[n % len(prompts)]).items()
        ]


def _gangs(negative: Prompt) -> Mapping[str, Mapping[str, object]]:
    guidance = {"guidance_scale": 1.5, "negative_prompt": negative, "seed": SEED}
    return {"guidance": guidance, "beam search": {"use_beam_search": True, "beam_width": MOST_TOGETHER}}


def _request(
    front: Front, name: str, prompt: Prompt, turn: int, fields: Mapping[str, object], max_tokens: int
) -> VerifyRequest:
    usual: Mapping[str, object] = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    drawn = {} if "use_beam_search" in fields else DRAWN
    made: SamplingParams = SamplingParams(**{**usual, **drawn, **fields})  # type: ignore[arg-type]
    return VerifyRequest(name, replace(front.prepare(prompt, made), id=name), turn)


def sampler_cells(batch: int, block_size: int, requests: Iterable[VerifyRequest]) -> Iterator[Cell]:
    """Each sampler that has a request: in batches and chunks, preempted, and behind a cache and drafts."""
    keeps, turns = {"prefix_cache": True, "snapshot_interval": block_size}, {one.turn for one in requests}
    for turn, what in ((SAMPLED, "samplers"), (TOGETHER, "guidance and beams")):
        if turn not in turns:
            continue
        count = batch if turn == SAMPLED else max(batch, 2 * MOST_TOGETHER)
        seqs = {"max_num_seqs": count}
        yield Cell(f"{what}, together", seqs, (turn,))
        cut = seqs | keeps | {"max_num_batched_tokens": max(FEW, count)}
        yield Cell(f"{what}, in chunks, with a cache", cut, (turn, turn), is_quick=True, proof="hit_tokens")
        yield Cell(f"{what}, preempted", seqs, (turn,), spared=1, proof="preemptions")
        swap = seqs | {"swap_memory": GIB}
        yield Cell(f"{what}, swapped out and in", swap, (turn,), spared=1, swaps=True, proof="swaps")
        yield Cell(f"{what}, steps that fail", seqs | keeps, (turn,), fails=True, proof="failed_steps")
    if SAMPLED in turns:
        seqs = {"max_num_seqs": batch}
        yield Cell("samplers, right and wrong drafts", seqs, (SAMPLED,), drafts="known", proof="drafted")


def most_together(waves: Sequence[Sequence[VerifyRequest]]) -> int:
    """The most sequences of a request that have memory together or not at all."""
    params = [asked.request.params for wave in waves for asked in wave]
    return max([one.num_beams if one.use_beam_search else 1 + one.is_guided for one in params], default=1)
