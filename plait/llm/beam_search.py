"""`LLM.beam_search`: parameters and results in vLLM's shape, searched by transformers' rules.

`schedule/beams` says where the two differ.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from plait.llm.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from plait.request import SamplingParams


class BeamSearchParams(Struct, frozen=True, kw_only=True):
    """How beams are searched. `SamplingFields` and `ChoiceFields` describe the fields.

    `logprobs`: alternatives with each token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0

    def sampling(self) -> SamplingParams:
        """The same as a request has it. Raises InvalidField."""
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
        )


class BeamSearchSequence(Struct):
    """One result. `tokens`: the prompt's and the output's, the one that ended it not among them.

    `logprobs`: one entry per token of the output. `cum_logprob`: their sum. `text`: of the output alone.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(Struct):
    """The results of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_output(found: RequestOutput) -> BeamSearchOutput:
    """A finished request with beam search as `LLM.beam_search` returns it."""
    return BeamSearchOutput([_sequence(found.prompt_token_ids, one) for one in found.outputs])


def _sequence(prompt: list[int], one: CompletionOutput) -> BeamSearchSequence:
    logprobs = one.logprobs or []
    total = sum(entry[token].logprob for entry, token in zip(logprobs, one.token_ids, strict=True))
    return BeamSearchSequence(
        [*prompt, *one.token_ids], logprobs, total, one.text, one.finish_reason, one.stop_reason
    )
