"""The markers of thinking in replies, and how a model's own are found."""

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
    """The markers of one family. The first pair is the one that a template may open by itself.

    `signs`: a chat template that holds all of them is of this kind; `tokens`: control tokens that mean it
    where no template does. `wrappers` enclose content and are passed over. `between`: what a model may
    write after its thinking. `final`: what must come before content, where it has a marker of its own.
    `before`: what a prompt for a new reply ends with then, if not with what is `between`.
    `anywhere`: thinking may also begin behind content, as every part of a reply has a marker.
    """

    name: str
    pairs: tuple[Pair, ...]
    signs: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    between: tuple[str, ...] = ("\n\n", "\n", "")
    final: str = ""
    before: tuple[str, ...] = ()
    anywhere: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Every marker that must appear in the text: see `OutputParser.shown`."""
        return frozenset(self.wrappers) | {
            text for pair in self.pairs for text in (pair.opening, pair.closing)
        }

    def starts_open(self, prompt: str) -> bool:
        """Whether a prompt, decoded with its control tokens, ends inside a block of thinking.

        Only white space may follow the opening marker: further up it belongs to another message.
        """
        return any(prompt.rstrip().endswith(pair.opening) for pair in self.pairs)

    def has_begun(self, prompt: str) -> bool:
        """Whether a prompt ends where content may follow at once: behind its marker, or within a message.

        Where content has a marker, a prompt for a new reply ends with the text between messages.
        """
        before = self.before or self.between
        return not self.final or not any(prompt.rstrip().endswith(turn) for turn in before)

    def leaves_open(self, text: str) -> bool:
        """Whether an assistant's text begins a block of thinking and does not end it."""
        if self.anywhere:
            closed = max(text.rfind(pair.closing) for pair in self.pairs)
            return any(text.rfind(pair.opening) > closed for pair in self.pairs)
        rest = text.lstrip()
        while pair := next((pair for pair in self.pairs if rest.startswith(pair.opening)), None):
            _, is_closed, rest = rest.partition(pair.closing)
            if not is_closed:
                return True
            rest = rest.lstrip()
        return False


HARMONY_TURN, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"
COHERE_FINAL, COHERE_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
_THINK = Pair("<think>", "</think>")
REASONING: Mapping[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat(
            "agent",
            (Pair("<|think|>", "<|/think|>"), Pair("<|plan|>", "<|/plan|>")),
            signs=("<|/think|>",),
            tokens=("<|think|>", "<|/think|>", "<|plan|>", "<|/plan|>"),
            anywhere=True,
        ),
        ReasoningFormat(
            "granite",
            (_THINK,),
            signs=("</think>", "<response>"),
            wrappers=("<response>", "</response>"),
        ),
        ReasoningFormat(
            "cohere",
            (Pair("<|START_THINKING|>", "<|END_THINKING|>"),),
            signs=("<|START_THINKING|>",),
            tokens=("<|START_THINKING|>", "<|END_THINKING|>"),
            wrappers=(COHERE_FINAL, COHERE_END),
            between=("\n", ""),
            final=COHERE_FINAL,
            before=("<|CHATBOT_TOKEN|>", "<|END_THINKING|>"),
        ),
        ReasoningFormat("think", (_THINK,), signs=("</think>",), tokens=("<think>", "</think>")),
        ReasoningFormat(
            "mistral",
            (Pair("[THINK]", "[/THINK]"),),
            signs=("[/THINK]",),
            tokens=("[THINK]", "[/THINK]"),
        ),
        ReasoningFormat(
            "said",
            (Pair("Here is my thought process:", "Here is my response:"),),
            signs=("Here is my thought process:", "Here is my response:"),
        ),
        ReasoningFormat("seed", (Pair("<seed:think>", "</seed:think>"),), signs=("</seed:think>",)),
        ReasoningFormat(
            "harmony",
            (Pair("<|channel|>analysis<|message|>", "<|end|>"),),
            signs=("<|channel|>", "analysis", "<|message|>"),
            tokens=("<|channel|>", "<|message|>", "<|constrain|>"),
            wrappers=(HARMONY_TURN, HARMONY_FINAL, _COMMENTARY, "<|end|>", "<|return|>"),
            between=(HARMONY_TURN,),
            final=HARMONY_FINAL,
            anywhere=True,
        ),
    )
}
"""`think`: DeepSeek, Qwen, Nemotron, Falcon and most others; `agent`: the agent tokens of oxidizr's
vocabularies; `cohere`: Command R7B and A; `granite`: Granite 3.3,
and `said` 3.2; `harmony`: gpt-oss, as the tool format of that name."""


def reasoning_format(
    template: str, special_tokens: Collection[str] = (), name: str | None = None
) -> ReasoningFormat | None:
    """The markers of a model's thinking, or None. `name` chooses a format; "none" chooses none.

    Found in the chat template's text; failing that by the control tokens of the vocabulary. Raises
    ConfigError for an unknown name.
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
        if all(part in template for part in form.signs):
            return form
    for form in REASONING.values():
        if form.tokens and all(token in special_tokens for token in form.tokens):
            return form
    return None
