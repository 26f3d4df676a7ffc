"""/infill: the gap between two texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.engine.admission import RequestLimits
from plait.errors import ContextTooLong, InvalidField
from plait.server.llamacpp import infill
from plait.server.llamacpp.infill import MAX_EXTRA, ExtraFile, InfillParts, read_prompt
from plait.text.fill_in import FORMS
from plait.text.tokenizers.tokenizer import TextTokenizer
from tests.contract.wire import Client
from tests.server.fake import EOS
from tests.text.test_fill_in import vocabulary

FORM = FORMS[0]


def context(tokenizer: TextTokenizer | None) -> Any:
    limits = RequestLimits(vocab_size=512, max_model_len=64)
    return SimpleNamespace(front=SimpleNamespace(tokenizer=tokenizer, limits=limits))


def test_the_prompt_is_the_beginning_of_what_is_filled_in() -> None:
    parts = InfillParts(input_prefix="ab", input_suffix="c", prompt="d")
    assert read_prompt(context(vocabulary(*FORM)), parts) == [300, 97, 98, 301, 99, 302, 100]


def test_other_files_come_first_and_none_is_a_control_token() -> None:
    parts = InfillParts(input_suffix="c", input_extra=[ExtraFile(FORM[0], "n")])
    whole = [300, *f"n\n{FORM[0]}\n".encode(), 301, 302, 99, 303]
    assert read_prompt(context(vocabulary("<|file_sep|>", *FORM)), parts) == whole
    plain = [*f"n\n{FORM[0]}\n".encode(), 300, 301, 99, 302]
    assert read_prompt(context(vocabulary(*FORM)), parts) == plain


def test_what_cannot_be_filled_in_is_refused_by_its_field(client: Client) -> None:
    answer = client.post("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 4})
    assert (answer.status, answer.error["param"]) == (400, "input_suffix")
    assert "no tokens for filling in" in answer.error["message"]
    assert client.post("/infill", {"input_extra": [{"filename": "x"}]}).status == 400
    many = InfillParts(input_extra=[ExtraFile("")] * (MAX_EXTRA + 1))
    with pytest.raises(InvalidField, match="257 files are more than 256"):
        read_prompt(context(vocabulary(*FORM)), many)
    with pytest.raises(InvalidField, match="no tokenizer"):
        read_prompt(context(None), InfillParts())
    with pytest.raises(ContextTooLong):
        read_prompt(context(vocabulary(*FORM)), InfillParts(input_prefix="x" * 10_000))


def test_a_reply_has_the_shape_of_a_completion(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill, "read_prompt", lambda context, parts: [*parts.input_prefix.encode(), EOS])
    found = client.post("/infill", {"input_prefix": "ab", "n_predict": 8}).json
    assert found["stop"] is True
    assert found["generation_settings"]["n_predict"] == 8
