"""The markers of thinking in replies, and how a model's own are found."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from plait.errors import ConfigError


class Pair(Struct, frozen=True):
    """The markers around a block of thinking."""

    opening: str
    closing: str


class ReasoningFormat(Struct, frozen=True):
    """The markers of one family. The first pair is the one that a template may open by itself.

    `signs`: a chat template that holds all of them is of this kind; `tokens`: control tokens that mean it
    where no template does. `wrappers` enclose content and are passed over. `between`: what a model may
    write after its thinking. `final`: what must come before content, where it has a marker of its own.
    `before`: what a prompt for a new reply ends with then, if not with what is `between`.
    `anywhere`: thinking may also begin behind content, as every part of a reply has a marker.
    `until`: markers of what follows that end thinking without its closing marker. They remain in the text.
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
    until: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Every marker that must appear in the text: see `OutputParser.find_shown`."""
        return frozenset((*self.wrappers, *self.until)) | {
            text for pair in self.pairs for text in (pair.opening, pair.closing)
        }

    def starts_open(self, prompt: str) -> bool:
        """Whether a prompt, decoded with its control tokens, ends inside a block of thinking.

        Only white space may follow the opening marker: further up it belongs to another message.
        """
        return any(prompt.rstrip().endswith(pair.opening.rstrip()) for pair in self.pairs)

    def has_begun(self, prompt: str) -> bool:
        """Whether a prompt ends where content may follow at once: behind its marker, or within a message.

        Where content has a marker, a prompt for a new reply ends with the text between messages.
        """
        before = self.before or self.between
        return not self.final or not any(prompt.rstrip().endswith(turn) for turn in before)

    def leaves_open(self, text: str) -> bool:
        """Whether an assistant's text begins a block of thinking and does not end it."""
        if self.anywhere:
            closed = max(text.rfind(end) for end in (*(pair.closing for pair in self.pairs), *self.until))
            return any(text.rfind(pair.opening) > closed for pair in self.pairs)
        rest = text.lstrip()
        while pair := next((pair for pair in self.pairs if rest.startswith(pair.opening)), None):
            thought, is_closed, rest = rest.partition(pair.closing)
            if any(marker in thought for marker in self.until):
                return False
            if not is_closed:
                return True
            rest = rest.lstrip()
        return False


HARMONY_TURN, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"
COHERE_FINAL, COHERE_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
COHERE_TEXT, COHERE_TEXT_END = "<|START_TEXT|>", "<|END_TEXT|>"
KIMI_FINAL, KIMI_CLOSE = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
_KIMI_MESSAGE = ('<|open|>message role="assistant"<|sep|>', "<|close|>message<|sep|>")
SOLAR_TURN, SOLAR_FINAL = "<|begin|>assistant", "<|content|>"
_THINK = Pair("<think>", "</think>")


def _pair(name: str, opening: str, closing: str, signs: tuple[str, ...] = ()) -> ReasoningFormat:
    """A format of which one pair of markers says all."""
    return ReasoningFormat(name, (Pair(opening, closing),), signs or (closing,), tokens=signs or (opening,))


def _cohere(name: str, final: str, end: str, signs: tuple[str, ...] = ()) -> ReasoningFormat:
    return ReasoningFormat(
        name,
        (Pair("<|START_THINKING|>", "<|END_THINKING|>"),),
        signs=("<|START_THINKING|>", *signs),
        tokens=("<|START_THINKING|>", "<|END_THINKING|>", *signs),
        wrappers=(final, end),
        between=("\n", ""),
        final=final,
        before=("<|CHATBOT_TOKEN|>", "<|END_THINKING|>"),
    )


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
            "kimi_k3",
            (Pair("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
            signs=("<|open|>", "<|close|>", "<|sep|>"),
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
            wrappers=(KIMI_FINAL, KIMI_CLOSE, _KIMI_MESSAGE[1]),
            between=("",),
            final=KIMI_FINAL,
            before=(_KIMI_MESSAGE[0], "<|close|>think<|sep|>"),
        ),
        ReasoningFormat(
            "solar_open",
            (Pair("<|think|>", "<|end|>"),),
            signs=("<|think|>", "<|content|>", "<|end|>"),
            wrappers=(SOLAR_TURN, SOLAR_FINAL, "<|end|>", "<|flush|>"),
            between=(SOLAR_TURN,),
            final=SOLAR_FINAL,
            anywhere=True,
        ),
        _pair("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        _pair("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
        _pair("hy3", "<think:opensource>", "</think:opensource>"),
        _pair("longcat", "<longcat_think>", "</longcat_think>"),
        ReasoningFormat(
            "ifm",
            tuple(Pair(f"<ifm|think{how}>", f"</ifm|think{how}>") for how in ("", "_fast", "_faster")),
            signs=("<ifm|think>",),
            tokens=("<ifm|think>", "</ifm|think>"),
            until=("<ifm|tool_calls>",),
        ),
        _pair("kimi_dev", "◁think▷", "◁/think▷"),
        _pair("pangu", "[unused16]", "[unused17]"),
        _pair("seed", "<seed:think>", "</seed:think>"),
        _pair("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat(
            "hunyuan", (_THINK,), signs=("</think>", "<answer>"), wrappers=("<answer>", "</answer>")
        ),
        ReasoningFormat(
            "granite", (_THINK,), signs=("</think>", "<response>"), wrappers=("<response>", "</response>")
        ),
        _cohere("cohere_text", COHERE_TEXT, COHERE_TEXT_END, ("<|START_TEXT|>",)),
        _cohere("cohere", COHERE_FINAL, COHERE_END),
        ReasoningFormat("think", (_THINK,), signs=("</think>",), tokens=("<think>", "</think>")),
        ReasoningFormat(
            "mistral", (Pair("[THINK]", "[/THINK]"),), signs=("[/THINK]",), tokens=("[THINK]", "[/THINK]")
        ),
        ReasoningFormat(
            "said",
            (Pair("Here is my thought process:", "Here is my response:"),),
            signs=("Here is my thought process:", "Here is my response:"),
        ),
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
vocabularies; `cohere`: Command R7B and A, `cohere_text`: later ones; `granite`: Granite 3.3 and ERNIE 4.5;
`said`: Granite 3.2; `hunyuan`: A13B, `hy3`: as it was published; `harmony`: gpt-oss."""


def unknown_format(kind: str, name: str, known: Collection[str]) -> ConfigError:
    """The error for a name that an option has, and no format."""
    there = f"there are {', '.join(known)}, and none"
    return ConfigError(
        f"{kind} format {name!r} is not known; {there}; without the option the chat template decides"
    )


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
            raise unknown_format("reasoning", name, REASONING)
        return REASONING[name]
    for form in REASONING.values():
        if all(part in template for part in form.signs):
            return form
    for form in REASONING.values():
        if form.tokens and all(token in special_tokens for token in form.tokens):
            return form
    return None
