"""The requests of `plait verify`: a few short prompts, some with the same beginning, greedy and sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import ContextTooLong
from plait.frontend.frontend import Front
from plait.request import Request, SamplingParams

Prompt = str | Sequence[int]
SHARED = (
    "You answer questions about the sea for people who have never seen it. Answer in one short sentence, "
    "use plain words, and say so when you do not know.\n\nQuestion: "
)
TEXTS = (
    "The sea",
    SHARED + "Why is the water salty?\nAnswer:",
    SHARED + "How deep is it, and who has been down there?\nAnswer:",
    "red, green, blue, red, green, blue, red, green, blue, red, green,",
)
LENGTHS = (3, 40, 45, 30)  # in tokens, where there is no text
NUM_SHARED = 35
# Where a step takes long, with blocks of 4: the same beginning fills one, and a reply of 3 begins another.
SHORT_BLOCK, SHORT_LENGTHS, NUM_SHORT_SHARED = 4, (6, 7), 5
SEED = 20240  # of the sampled replies; each prompt has one of its own


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A request with a name. `turn` 2: the prompt of `first`, its reply, and a few tokens more."""

    name: str
    request: Request
    turn: int = 1

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)


def default_prompts(front: Front, max_tokens: int) -> list[Prompt]:
    """Texts, or token ids for a model without a tokenizer, cut so that two replies fit after them."""
    if front.tokenizer is None:
        prompts = make_up_prompts(front.spec.vocab_size)
    else:
        asked = SamplingParams(max_tokens=1)
        prompts = [front.prepare(text, asked).prompt_token_ids for text in TEXTS]
    room = front.max_model_len - 2 * max_tokens - min(map(len, prompts))
    return [prompt[: max(room, 1)] for prompt in prompts]


def make_short_prompts(vocab_size: int) -> list[Prompt]:
    """Two that begin alike."""
    rng = random.Random(SEED)
    one, other = (tuple(rng.randrange(vocab_size) for _ in range(n)) for n in SHORT_LENGTHS)
    return [one, one[:NUM_SHORT_SHARED] + other[NUM_SHORT_SHARED:]]


def make_up_prompts(vocab_size: int, round_number: int = 1) -> list[Prompt]:
    """Token ids in the form of `TEXTS`: one short, two that begin alike, one that repeats itself.

    Other rounds have other tokens, and lengths that are drawn.
    """
    rng = random.Random(SEED + round_number - 1)
    lengths: tuple[int, ...] = LENGTHS
    shared = NUM_SHARED
    if round_number > 1:
        shared = rng.randrange(17, 90)
        long = [shared + rng.randrange(1, 60) for _ in range(2)]
        lengths = (rng.randrange(1, 17), *long, rng.randrange(20, 99))
    short, one, other, _ = (tuple(rng.randrange(vocab_size) for _ in range(n)) for n in lengths)
    again = tuple(short[n % len(short)] for n in range(lengths[3]))
    return [short, one, one[:shared] + other[shared:], again]


def first_turns(front: Front, prompts: Sequence[Prompt], max_tokens: int, batch: int) -> list[VerifyRequest]:
    """Each prompt greedily and sampled with a seed, and sampled again until a batch can be full.

    Raises InvalidField and ContextTooLong for a prompt that the model cannot take with its whole reply.
    """
    asked = [_first(front, n, prompt, max_tokens, None) for n, prompt in enumerate(prompts, 1)]
    draws = 0
    while draws == 0 or len(asked) < batch:
        seeds = [SEED + draws * len(prompts) + n for n in range(len(prompts))]
        pairs = zip(prompts, seeds, strict=True)
        asked += [_first(front, n, prompt, max_tokens, seed) for n, (prompt, seed) in enumerate(pairs, 1)]
        draws += 1
    return asked


def _first(front: Front, number: int, prompt: Prompt, max_tokens: int, seed: int | None) -> VerifyRequest:
    # Two alternatives with each token: the gap between the best two shows how near they were.
    wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    if seed is not None:
        wanted = replace(wanted, temperature=0.9, top_p=0.95, seed=seed)
    name = f"prompt {number}, " + ("greedy" if seed is None else f"drawn with seed {seed}")
    request = front.prepare(prompt, wanted)
    if request.params.max_tokens != max_tokens:
        raise ContextTooLong(
            f"{name}: {len(request.prompt_token_ids)} tokens and a reply of {max_tokens} do not fit into the "
            f"context of {front.max_model_len}; shorten the prompt, or give a smaller --max-tokens"
        )
    return VerifyRequest(name, replace(request, id=name))


def second_turns(
    asked: Sequence[VerifyRequest], replies: Sequence[Sequence[int]], max_model_len: int
) -> list[VerifyRequest]:
    """Continue each conversation that fits the context: the prompt, its reply, and the shortest prompt."""
    more = min((a.request.prompt_token_ids for a in asked), key=len)
    found = []
    for one, reply in zip(asked, replies, strict=True):
        ids = (*one.request.prompt_token_ids, *reply, *more)
        if len(ids) + len(reply) <= max_model_len:
            name = f"{one.name}, second turn"
            found.append(VerifyRequest(name, replace(one.request, id=name, prompt_token_ids=ids), 2))
    return found


def ask_tokens_only(asked: VerifyRequest, *, is_watched: bool) -> VerifyRequest:
    """The same request without log-probabilities, and perhaps without a stream: the whole reply at once."""
    params = replace(asked.request.params, logprobs=None)
    return replace(asked, request=replace(asked.request, params=params, watched=is_watched))
