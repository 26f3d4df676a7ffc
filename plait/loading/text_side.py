"""Where the text side of a model lies: plain values, so that a process without torch can read it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from plait.errors import BadFile, InvalidField
from plait.frontend.frontend import Language
from plait.frontend.model_head import NO_HEAD, ModelHead
from plait.request import SamplingParams
from plait.text.generation_rules import NAME, list_suppressed, list_unread
from plait.text.load import load_chat_template, load_generation_config, load_tokenizer
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """What the readers of tokenizers and templates need.

    `directory`: where files of text lie, if there are any. It is absolute, because a startup image is used
    from any working directory. `metadata`: of a GGUF file, the keys about text. `config`: of the model's, the
    keys about tokens. `vocab`, `chat_template`: the user's. `head`: the values of its `ModelHead`.
    """

    name: str
    vocab_size: int
    directory: str | None = None
    metadata: Mapping[str, object] | None = None
    config: Mapping[str, object] | None = None
    vocab: str | None = None
    chat_template: str | None = None
    oxidizr: bool = False
    sampling: Mapping[str, object] | None = None  # what holds where generation_config.json says nothing
    head: Mapping[str, object] | None = None

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that belongs to the model, if one can be found."""
        return load_tokenizer(
            directory=self._path,
            metadata=self.metadata,
            vocab=self.vocab,
            vocab_size=self.vocab_size,
            config=self.config,
            oxidizr=self.oxidizr,
        )

    def list_suppressed(self) -> tuple[int, ...]:
        """Ids that its generation_config.json forbids in every reply. Raises BadFile."""
        return list_suppressed(load_generation_config(self._path, self.metadata), self.vocab_size)

    def language(self) -> Language:
        """The whole text side. Raises BadFile, UnsupportedFormat and ConfigError."""
        tokenizer = self.tokenizer()
        generation_config = load_generation_config(self._path, self.metadata)
        said = {key: value for key, value in generation_config.items() if value is not None}
        generation_config = {**(self.sampling or {}), **said}
        list_suppressed(generation_config, self.vocab_size)  # names what it cannot read, before it is used
        if unread := list_unread(generation_config):
            log.warning("%s of %s: %s, not read", NAME, self.name, ", ".join(unread))
        try:
            SamplingParams().resolve(generation_config)
        except InvalidField as error:
            raise BadFile(f"generation_config.json of {self.name}: {error}") from error
        template = load_chat_template(
            directory=self._path,
            metadata=self.metadata,
            option=self.chat_template,
            tokenizer=tokenizer,
            oxidizr=self.oxidizr,
        )
        stops = tokenizer.eos_token_ids if tokenizer else _as_set(generation_config.get("eos_token_id"))
        ends = template.stop_token_ids if template else frozenset()
        head = NO_HEAD if self.head is None else ModelHead.from_values(self.head)
        return Language(tokenizer, template, generation_config, stops | ends, head)

    def to_json(self) -> bytes:
        """All of it as JSON. Strings in files may not be Unicode; JSON can escape those."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values, default=list).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TextSource:
        """What `to_json` wrote."""
        return cls(**json.loads(data))

    @property
    def _path(self) -> Path | None:
        return None if self.directory is None else Path(self.directory)


def _as_set(value: int | list[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or [])
