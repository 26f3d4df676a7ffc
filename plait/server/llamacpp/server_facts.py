"""GET /props and /slots: facts about the server in llama.cpp's words.

There are no slots of its kind here: a slot stands for one of the sequences that may run at a time, and the
first ones are those that run. No prompt and no path is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from plait.request import SamplingParams
from plait.server.api.endpoint import ModelLookup
from plait.server.api.token_scores import Count
from plait.version import __version__

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """`n_ctx`: tokens of a sequence; `params`: what holds where a request is silent."""

    n_ctx: Count
    params: dict[str, object]


class Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /props. `model_path` is the model's name: no path is shown."""

    default_generation_settings: GenerationDefaults
    total_slots: Count
    model_path: str
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities = Modalities()
    build_info: str = f"plait-{__version__}"
    is_sleeping: bool = False


class SlotFacts(msgspec.Struct, frozen=True):
    """A sequence that may run."""

    id: Count
    n_ctx: Count
    is_processing: bool


def props(front: Front, name: str) -> Props:
    """Facts about the server and its model."""
    params = SamplingParams(max_tokens=None).resolve(front.generation_config)
    settings: dict[str, Any] = {one: getattr(params, one) for one in _SETTINGS}
    settings |= {"n_predict": -1, "repeat_penalty": params.repetition_penalty, "stop": []}
    tokenizer, template = front.tokenizer, front.chat_template
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id) if tokenizer else (None, None)
    bos, eos = (tokenizer.token_text(i) if tokenizer and i is not None else "" for i in ends)
    return Props(
        default_generation_settings=GenerationDefaults(front.max_model_len, settings),
        total_slots=front.max_num_seqs,
        model_path=front.name,
        model_alias=name,
        chat_template=template.source if template else "",
        bos_token=bos,
        eos_token=eos,
    )


def slots(front: Front, name: str) -> list[SlotFacts]:
    """A slot for each sequence that may run at a time; as many work as sequences run."""
    running = front.stats().get("num_running", 0)
    return [SlotFacts(i, front.max_model_len, i < running) for i in range(front.max_num_seqs)]


FACTS = (ModelLookup("/props", props), ModelLookup("/slots", slots))
