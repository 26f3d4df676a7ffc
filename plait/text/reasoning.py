"""How models mark their thinking, and which way a model does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pair:
    """The markers around a block of thinking."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of one family. The first pair is the one that a template may open by itself."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def markers(self) -> frozenset[str]:
        """Every marker that must stand in the text: see `OutputParser.markers`."""
        return frozenset(marker for pair in self.pairs for marker in (pair.opening, pair.closing))

    def starts_open(self, prompt: str) -> bool:
        """Whether a prompt, decoded with its control tokens, ends inside a block of thinking.

        Only white space may follow the opening marker: further up it belongs to another message.
        """
        return any(prompt.rstrip().endswith(pair.opening) for pair in self.pairs)


REASONING: Mapping[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("think", (Pair("<think>", "</think>"),)),
        ReasoningFormat("agent", (Pair("<|think|>", "<|/think|>"), Pair("<|plan|>", "<|/plan|>"))),
        ReasoningFormat("mistral", (Pair("[THINK]", "[/THINK]"),)),
        ReasoningFormat("seed", (Pair("<seed:think>", "</seed:think>"),)),
        ReasoningFormat("thinking", (Pair("<|thinking_start|>", "<|thinking_end|>"),)),
    )
}
"""`think`: DeepSeek, Qwen, Granite, Nemotron, Falcon; `agent`: the agent tokens of oxidizr's vocabularies."""


def reasoning_format(
    template: str, special_tokens: Collection[str] = (), name: str | None = None
) -> ReasoningFormat | None:
    """The way a model marks its thinking, or None. `name` chooses one; "none" chooses none.

    Found in the chat template's text; failing that in the vocabulary, where only markers that mean nothing
    else count. Raises ConfigError for an unknown name.
    """
    if name == "none":
        return None
    if name is not None:
        if name not in REASONING:
            raise ConfigError(
                f"reasoning format {name!r} is not known; there are {', '.join(REASONING)}, and none"
            )
        return REASONING[name]
    for form in REASONING.values():
        if any(pair.closing in template for pair in form.pairs):
            return form
    for form in REASONING.values():
        if all(marker in special_tokens for marker in form.markers):
            return form
    return None
