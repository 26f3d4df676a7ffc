"""The built-in chat formats: control tokens by id, contents between them. Nothing is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import BadTemplate, ConfigError
from plait.text.chat.template import CallsTaken, Message, message_text, normalize_messages, refuse_unread
from plait.text.tokenizers.tokenizer import Tokenizer

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Format:
    """How a turn is written: opening marker, head, content, closing marker, tail.

    `{role}` in the markers and the head stands for the role. `stops` are the markers that end a reply.
    `free_role` is how a turn of an unknown role is written; None: it is refused.
    """

    opening: str
    stops: tuple[str, ...]
    head: str = ""
    closing: str | None = None
    tail: str = ""
    free_role: str | None = None


FORMATS: Mapping[str, Format] = {
    "oxidizr": Format("<|{role}|>", ("<|endoftext|>", "<|user|>", "<|system|>")),
    "blazr": Format(
        "<|{role}|>",
        ("<|endoftext|>", "<|user|>", "<|system|>"),
        head="\n",
        tail="\n",
        free_role="{role}: {content}\n",
    ),
    "chatml": Format(
        "<|im_start|>",
        ("<|im_end|>",),
        head="{role}\n",
        closing="<|im_end|>",
        tail="\n",
        free_role="{role}\n{content}",
    ),
}
"""`oxidizr`: what its models were trained on; `blazr`: the same markers with line ends."""


class MarkerTemplate:
    """One of the built-in formats over a vocabulary. Raises ConfigError when that lacks its markers."""

    source, variables, calls = "", frozenset[str](), CallsTaken()

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name, self._format, self._tokenizer = name, FORMATS[name], tokenizer
        self._ids = {text: self._marker(text) for text in self._markers()}
        stops = (tokenizer.token_id(text) for text in self._format.stops)
        self.stop_token_ids = frozenset(i for i in stops if i in tokenizer.special_ids)

    def _markers(self) -> set[str]:
        markers = {self._format.opening.format(role=role) for role in _ROLES}
        return markers if self._format.closing is None else markers | {self._format.closing}

    def _marker(self, text: str) -> int:
        token_id = self._tokenizer.token_id(text)
        if token_id is None or token_id not in self._tokenizer.special_ids:
            raise ConfigError(
                f"chat_template: {self.name!r} needs the control token {text}, which the vocabulary "
                f"{self._tokenizer.name} does not have; give a Jinja file, or another --vocab"
            )
        return token_id

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation; see `ChatTemplate.render`."""
        refuse_unread(self.name, kwargs, tools, frozenset())
        parts: list[int | str] = []
        turn: list[int | str] = []
        for i, message in enumerate(normalize_messages(messages)):
            turn = self._turn(message["role"], message_text(message, i), i)
            parts += turn
        if continue_final_message:
            del parts[len(parts) - len(turn) + 2 :]  # an opening and a text; the rest closes the turn
        elif add_generation_prompt:
            parts.append(self._ids[self._format.opening.format(role="assistant")])
            parts.append(self._format.head.format(role="assistant"))
        return self._tokenizer.encode_parts(parts)

    def _turn(self, role: str, content: str, i: int) -> list[int | str]:
        form = self._format
        if role not in _ROLES and form.free_role is None:
            raise BadTemplate(
                f"messages[{i}].role: {role!r} has no token in the chat format {self.name!r}; "
                f"it knows {', '.join(_ROLES)}",
                f"messages[{i}].role",
            )
        opening = form.opening.format(role=role)
        closing = [] if form.closing is None else [self._ids[form.closing]]
        if role not in _ROLES and opening not in self._ids:
            return [str(form.free_role).format(role=role, content=content), *closing]
        return [self._ids[opening], form.head.format(role=role) + content, *closing, form.tail]

    def start(self, *, is_chosen: bool = False) -> None:
        """Nothing is read."""

    def close(self) -> None:
        """Nothing is held."""
