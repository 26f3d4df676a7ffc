"""Which sampling fields go together, as a request sends them: before the model's defaults are filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from plait.errors import InvalidField
from plait.request import Grammar, SamplingParams, ThinkingBudget
from plait.sampling_fields import SamplingFields
from plait.text.stops.expressions import find_automaton

# With beam search tokens are not drawn, so what changes a draw is refused; these values change nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
}
# Fields that a beam search keeps, and those that need another sampler to mean anything.
ANY_VALUE = frozenset(
    {
        *("seed", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
        *(
            "dynatemp_exponent",
            "smoothing_curve",
            "xtc_threshold",
            "mirostat_tau",
            "mirostat_eta",
            "dry_base",
        ),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    }
)
OTHERS = ("best_of", "stop", "stop_regex", "guidance_scale", "prompt_logprobs", "structured_outputs")
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
ALONE = "with use_beam_search texts are not drawn, masked or cut; leave it out"


def check_combination(params: SamplingParams, max_num_seqs: int) -> None:
    """Raises InvalidField for a field that does not go with another, naming it."""
    if params.use_beam_search:
        _check_beams(params, max_num_seqs)
    else:
        usual = SamplingParams()
        for name in BEAM_FIELDS:
            if getattr(params, name) != getattr(usual, name):
                raise InvalidField(f"{name}: it needs use_beam_search: true", name)
    if params.is_guided and max_num_seqs < 2:
        text = "it computes two sequences in a step, and this server has one (--max-num-seqs 1)"
        raise InvalidField(f"guidance_scale: {text}", "guidance_scale")
    if params.is_guided and params.max_tokens == 0:
        text = "max_tokens: 0 leaves nothing to guide; send 1 or more, or no guidance_scale"
        raise InvalidField(text, "max_tokens")
    if params.negative_prompt is not None and not params.is_guided:
        raise InvalidField("negative_prompt: it needs a guidance_scale other than 1", "negative_prompt")


def _check_beams(params: SamplingParams, max_num_seqs: int) -> None:
    usual = SamplingParams()
    for name in (*(field.name for field in fields(SamplingFields)), *OTHERS):
        value = getattr(params, name)
        if name not in ANY_VALUE and value not in NEUTRAL.get(name, (getattr(usual, name),)):
            raise InvalidField(f"{name}: {ALONE}", name)
    if params.max_tokens == 0:
        raise InvalidField("max_tokens: 0 leaves beam search nothing to do; send 1 or more", "max_tokens")
    if (num_beams := params.num_beams) > max_num_seqs:
        name = "n" if params.beam_width is None else "beam_width"
        most = f"{max_num_seqs}, the most sequences of a step (--max-num-seqs)"
        raise InvalidField(f"{name}: {num_beams} beams are more than {most}", name)


def check_unconstrained(grammar: Grammar | None, thinking: ThinkingBudget | None) -> None:
    """Raises InvalidField for a beam search with a grammar, or with a budget of thinking."""
    if grammar is not None:
        name = grammar.param or "tools"
        raise InvalidField(f"{name}: {ALONE}", name)
    if thinking is not None:
        raise InvalidField(f"thinking_token_budget: {ALONE}", "thinking_token_budget")


def resolve(params: SamplingParams, generation_config: Mapping[str, object]) -> SamplingParams:
    """With every open parameter filled in; a beam search takes none of the model's defaults for draws."""
    if not params.use_beam_search:
        return params.resolve(generation_config)
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def check_stops(params: SamplingParams, wordless: str | None) -> None:
    """Raises InvalidField for stops by text at a model without a tokenizer: `wordless` is its name."""
    if params.is_ended_by_text and wordless is not None:
        name = "stop" if params.stop else "stop_regex"
        raise InvalidField(
            f"{name}: {wordless} has no tokenizer, so no text can stop it; send stop_token_ids, or name "
            "a vocabulary with --vocab",
            name,
        )
    if params.stop_regex:
        find_automaton(params.stop_regex)
