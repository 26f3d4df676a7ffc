"""Templates that cannot be used: detected once, when they are read, and reported in words from then on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadTemplate, CapacityError, ConfigError
from plait.text.chat.jinja import MAX_CHARS, JinjaTemplate
from plait.text.chat.sandbox import Sandbox, SandboxLimits, TemplateEnded
from plait.text.chat.template import boundaries
from plait.text.load import load_chat_template
from plait.text.tokenizers.builtin import builtin_tokenizer

TOKENIZER = builtin_tokenizer("cl100k_base")
HI = [{"role": "user", "content": "hi"}]
LONG = "{{ messages }}" * 800_000


class Recorded(Sandbox):
    """Answers at once. `ends_at`: which reading or rendering takes too long, counted from 1; 0: none."""

    def __init__(self, ends_at: int = 0, error: Exception | None = None) -> None:
        super().__init__()
        self.asked, self._ends_at = list[str](), ends_at
        self._error = error or TemplateEnded("the chat template did not finish within 2 s")

    def read(self, template: str) -> frozenset[str]:
        self._count(template)
        return frozenset({"messages", "tools"})

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        self._count(template)
        return str(values["messages"][-1]["content"])

    def _count(self, template: str) -> None:
        self.asked.append(template)
        if len(self.asked) == self._ends_at:
            raise self._error


def template(sandbox: Sandbox, source: str = "{{ messages }}") -> JinjaTemplate:
    return JinjaTemplate("test", {"default": source}, TOKENIZER, {}, sandbox)


@pytest.mark.parametrize("ends_at", [1, 2, 3, 4])
def test_a_template_that_does_not_end_is_tried_once(ends_at: int) -> None:
    sandbox = Recorded(ends_at)
    found = template(sandbox)
    found.start()
    for use in (lambda: found.render(HI), lambda: found.variables, lambda: found.calls):
        with pytest.raises(BadTemplate, match=r"cannot be used: .*within 2 s; give another one"):
            use()
    assert len(sandbox.asked) == ends_at


def test_a_template_that_refuses_the_probes_is_used() -> None:
    found = template(Recorded(2, BadTemplate("there must be a system message")))
    found.start()
    assert found.text(HI) == "hi"


def test_a_busy_machine_condemns_no_template() -> None:
    found = template(Recorded(1, CapacityError("busy")))
    found.start()
    assert found.text(HI) == "hi"


@pytest.mark.parametrize("continues", [False, True])
def test_a_text_with_every_private_character_of_the_first_plane_is_rendered(continues: bool) -> None:
    text = "<" + "".join(map(chr, range(0xE000, 0xF900)))
    ids = template(Recorded()).render(
        [*HI, {"role": "assistant", "content": text}],
        add_generation_prompt=False,
        continue_final_message=continues,
    )
    assert TOKENIZER.decode(ids) == text


def test_a_text_with_every_private_character_of_all_is_refused() -> None:
    ranges = (range(0xE000, 0xF900), range(0xF0000, 0x110000))
    text = "<" + "".join(chr(c) for numbers in ranges for c in numbers)
    for continues in (False, True):
        with pytest.raises(BadTemplate, match="every private character; leave some out"):
            template(Recorded()).render(
                [*HI, {"role": "assistant", "content": text}], continue_final_message=continues
            )


def test_a_chat_does_not_wait_for_ever_while_the_template_is_read() -> None:
    sandbox = Recorded()
    sandbox._limits = SandboxLimits(wait_s=0.01)
    found = template(sandbox)
    with found._lock, pytest.raises(CapacityError, match="still being read; try again later"):
        found.render(HI)
    assert found.text(HI) == "hi"
    with found._lock:  # what is known waits for nothing
        assert found.text(HI) == "hi"


def test_a_template_is_read_when_it_starts_and_not_again() -> None:
    sandbox = Recorded()
    found = template(sandbox)
    found.start()
    before = len(sandbox.asked)
    assert found.variables == {"messages", "tools"}
    found.render(HI)
    assert len(sandbox.asked) == before + 1


def test_what_makes_a_template_useless_is_logged_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "plait"):
        template(Recorded(1)).start()
    assert "no chats" in caplog.text
    with pytest.raises(ConfigError, match=r"chat_template: .*within 2 s"):
        template(Recorded(1)).start(is_chosen=True)


def test_an_option_that_is_too_long_is_refused_as_it_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "option.jinja").write_text(LONG)
    with pytest.raises(ConfigError, match=rf"112000\d\d bytes, and at most {MAX_CHARS} characters are read"):
        load_chat_template(directory=tmp_path, tokenizer=TOKENIZER, option=str(path))


@pytest.mark.parametrize("place", ["file", "named part", "config", "GGUF"])
def test_a_template_that_is_too_long_is_read_by_nothing(tmp_path: Path, place: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    given: dict[str, Any] = {"directory": model, "tokenizer": TOKENIZER}
    match place:
        case "file":
            (model / "chat_template.jinja").write_text(LONG)
        case "named part":
            (model / "chat_template.jinja").write_text("{{ messages }}")
            (model / "additional_chat_templates").mkdir()
            (model / "additional_chat_templates" / "rag.jinja").write_text(LONG)
        case "config":
            (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": LONG}))
        case "GGUF":
            given = {"metadata": {"tokenizer.chat_template": LONG}, "tokenizer": TOKENIZER}
    found = load_chat_template(**given)
    assert found is not None
    assert found.source == ""
    with pytest.raises(BadTemplate, match=rf"112000\d\d characters, and at most {MAX_CHARS} are read"):
        found.render(HI)
    with pytest.raises(ConfigError, match=f"at most {MAX_CHARS}"):
        found.start(is_chosen=True)


def test_boundaries_are_given_up_at_the_first_conversation_that_does_not_end() -> None:
    sandbox = Recorded()
    found = template(sandbox)
    found.start()
    messages = [{"role": "system", "content": "s"}, *HI, {"role": "assistant", "content": "a"}, *HI]
    ids = found.render(messages)
    sandbox.asked.clear()
    sandbox._ends_at = 1
    assert boundaries(found, messages, ids, {}) == ()
    assert len(sandbox.asked) == 1
