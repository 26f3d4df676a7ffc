"""The four built-in vocabularies of hybrid checkpoints: their ids, control tokens and holes.

The tables are the trained models' contract: an id never moves. The text of ordinary tokens comes compiled
into splintr; the tests check everything in these tables against it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

_IN_ORDER = """
system user assistant im_start im_end think /think plan /plan step /step act /act observe /observe
function /function result /result error /error code /code output /output lang /lang context /context
quote /quote cite /cite source /source memory /memory recall /recall pad stop sep image /image audio /audio
video /video title /title section /section summary /summary
"""
AGENT_NAMES = tuple(_IN_ORDER.split())
"""The 54 agent tokens in the order of their ids; the token of "system" is `<|system|>`."""

_MEDIA = range(42, 48)  # image … /video: in llama3 they lie on Llama's reserved slots


class BuiltinVocabulary(Struct, frozen=True):
    """`size` is the largest id plus one; `window` the model sizes (both ends) that mean this vocabulary.

    `ranks` is the number of ordinary tokens in its `.tiktoken` file. `special` does not hold agent tokens.
    """

    name: str
    size: int
    window: tuple[int, int]
    ranks: int
    first_agent_id: int
    eos: str
    special: Mapping[str, int]
    bos: str | None = None
    first_media_id: int | None = None
    ends: tuple[str, ...] = ()

    def agent_ids(self) -> dict[str, int]:
        """Text → id of the 54 agent tokens."""
        ids = {}
        for offset, name in enumerate(AGENT_NAMES):
            token_id = self.first_agent_id + offset
            if self.first_media_id is not None and offset in _MEDIA:
                token_id = self.first_media_id + offset - _MEDIA.start
            ids[f"<|{name}|>"] = token_id
        return ids

    def special_ids(self) -> dict[str, int]:
        """Text → id of every control token, agent tokens included."""
        return {**self.special, **self.agent_ids()}


_DEEPSEEK_TOOLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
)

BUILTIN: Mapping[str, BuiltinVocabulary] = {
    v.name: v
    for v in (
        BuiltinVocabulary(
            name="cl100k_base",
            size=100331,
            window=(100256, 100350),
            ranks=100256,
            first_agent_id=100277,
            eos="<|endoftext|>",
            special={
                "<|endoftext|>": 100257,
                "<|fim_prefix|>": 100258,
                "<|fim_middle|>": 100259,
                "<|fim_suffix|>": 100260,
                "<|endofprompt|>": 100276,
            },
        ),
        BuiltinVocabulary(
            name="o200k_base",
            size=200073,
            window=(199990, 200100),
            ranks=199998,
            first_agent_id=200019,
            eos="<|endoftext|>",
            special={"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        ),
        BuiltinVocabulary(
            name="llama3",
            size=128354,
            window=(128000, 128400),
            ranks=128000,
            first_agent_id=128300,
            first_media_id=128256,
            bos="<|begin_of_text|>",
            eos="<|end_of_text|>",
            ends=("<|eot_id|>", "<|eom_id|>"),
            special={
                "<|begin_of_text|>": 128000,
                "<|end_of_text|>": 128001,
                "<|reserved_special_token_0|>": 128002,
                "<|reserved_special_token_1|>": 128003,
                "<|finetune_right_pad_id|>": 128004,
                "<|step_id|>": 128005,
                "<|start_header_id|>": 128006,
                "<|end_header_id|>": 128007,
                "<|eom_id|>": 128008,
                "<|eot_id|>": 128009,
                "<|python_tag|>": 128010,
            },
        ),
        BuiltinVocabulary(
            name="deepseek_v3",
            size=128954,
            window=(128800, 129300),
            ranks=128000 - 3,
            first_agent_id=128900,
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            ends=("<|EOT|>",),
            special={
                "<｜begin▁of▁sentence｜>": 0,
                "<｜end▁of▁sentence｜>": 1,
                "<｜▁pad▁｜>": 2,
                "<think>": 128798,
                "</think>": 128799,
                "<｜fim▁hole｜>": 128800,
                "<｜fim▁begin｜>": 128801,
                "<｜fim▁end｜>": 128802,
                "<｜User｜>": 128803,
                "<｜Assistant｜>": 128804,
                "<|EOT|>": 128805,
                **{text: 128806 + n for n, text in enumerate(_DEEPSEEK_TOOLS)},
            },
        ),
    )
}


def detect_vocabulary(vocab_size: int) -> str | None:
    """The built-in vocabulary that a model of this size was trained with; None if none fits for certain.

    The windows around the four known sizes are exact. A size outside them (GPT-2's 50,257, Qwen's 151,936)
    belongs to another vocabulary, and the nearest of ours would print garbage.
    """
    for vocabulary in BUILTIN.values():
        low, high = vocabulary.window
        if low <= vocab_size <= high:
            return vocabulary.name
    return None
