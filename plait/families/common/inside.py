"""A text model inside one that also sees or hears: where its tensors are, and which ones belong to others."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from dataclasses import replace

from plait.checkpoint.names import NameMap, Source

# What the names of a text model begin with there; the first that a checkpoint has.
BODIES = (
    *("model.language_model.", "language_model.", "model.text_model.", "text_model."),
    *("thinker.model.language_model.", "thinker.model.", "llm.", "language."),
    *("vlm.model.language_model.", "model.model."),
)
OUTER = ("thinker.", "vlm.", "model.")  # of what writes text, next to what talks or acts
# Where a model that also sees has no body of its own for texts; all else is not of them.
_TEXT_PARTS = r"model\.(?:layers|embed_tokens|norm|lm_head)\b"
_DRAWN = r"_moe_gen\."  # in layers: what writes images (BAGEL)
_HEADS = ("lm_head", "score", "classifier")  # next to the body, of the whole model
_TOP = "model."  # where a text model alone has its layers
# Layers as transformers saves them: its renames of eyes (Kimi K2.5, Qianfan-OCR) meet texts, too.
_SAVED_AS = (".blocks.", ".encoder.layers.")
_IN_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.\d+\.(\w+\.\w+)")


def find_body(names: Iterable[str]) -> str | None:
    """The beginning of a text model's names in a checkpoint of more, or None where there is no more."""
    found = {body for name in names for body in BODIES if name.startswith(body)}
    return next((body for body in BODIES if body in found), None)


class _TextAlone:
    """The names of a checkpoint as those of a text model alone."""

    def __init__(self, body: str, present: Container[str]) -> None:
        self._body, self._present = body, present

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) in self._present

    def find(self, name: str) -> str:
        """Theirs, of a name as a text model alone has it."""
        ways = [f"{self._body}{name}", f"{self._body}{name.removeprefix(_TOP)}"]
        ways += [f"{self._body}{name}".replace(".layers.", other, 1) for other in _SAVED_AS]
        ways += [f"{outer}{name}" for outer in OUTER if self._body.startswith(outer)]  # its head
        return next((way for way in ways if way in self._present), name)


class Inside(NameMap):
    """A family's names below `body`. Tensors next to it may stay unused: they are of pictures and sound.

    body "": names of texts begin as usual.
    """

    def __init__(self, names: NameMap, body: str) -> None:
        self.own, self._body = names, body
        heads, outer = "|".join(_HEADS), "|".join(map(re.escape, OUTER))
        others = rf"^(?!{re.escape(body) or _TEXT_PARTS}|(?:{outer})?(?:{heads})\b)|{_DRAWN}"
        self.beside, self.ignored = _add(others, names.beside), _add(others, names.ignored)

    def resolve(self, name: str, present: Container[str] | None = None) -> tuple[Source, dict[str, str]]:
        """As the family's, where the checkpoint has it."""
        if present is None:
            return self.own.resolve(name)
        alone = _TextAlone(self._body, present)
        source, fields = self.own.resolve(name, alone)
        if isinstance(source, str):
            return alone.find(source), fields
        return replace(source, sources=tuple(map(alone.find, source.sources))), fields


def _add(pattern: str, own: re.Pattern[str] | None) -> re.Pattern[str]:
    return re.compile(f"{pattern}|(?:{own.pattern})" if own else pattern)


def follow_body(names: NameMap, tensors: Iterable[str]) -> NameMap:
    """A model's names as those of an adapter's tensors are: it may have another body than the model's files.

    Files keep names of old, and transformers trains with new ones.
    """
    own = names.own if isinstance(names, Inside) else names
    body = find_body(tensors)
    return own if body is None else Inside(own, body)


def find_in_files(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """The names that a model's files have for an adapter's tensors: their text model may have another body.

    The same name where they have no such tensor.
    """
    files, found = _TextAlone(find_body(present) or "", present), dict[str, str]()
    for name in names:
        own = find_body((name,))
        alone = name.removeprefix(own) if own else name
        ways = map(files.find, (name, alone, f"{_TOP}{alone}", alone.removeprefix(_TOP)))
        found[name] = next((way for way in ways if way in present), name)
    return found


def leave_out_beside(names: NameMap, tensors: Iterable[str]) -> list[str]:
    """The tensors without those next to a text model: a model alone has all of them."""
    return [name for name in tensors if not names.is_beside(name)]


def note_unread(names: NameMap, tensors: Iterable[str], what: str = "read") -> list[str]:
    """A line for a reader on the tensors next to a text model, or none where there is no more than it.

    what: is not done with them, as a participle.
    """
    beside = [name for name in tensors if names.is_beside(name)]
    parts = ", ".join(dict.fromkeys(map(_part_of, beside)))
    return [f"text alone: {len(beside)} tensors of {parts} are not {what}"] if beside else []


def _part_of(name: str) -> str:
    """The part of a model that a tensor belongs to; of a layer, what has it."""
    if match := _IN_LAYER.search(name):
        return match[1]
    for outer in OUTER:
        name = name.removeprefix(outer)
    return name.removeprefix(_TOP).partition(".")[0]
