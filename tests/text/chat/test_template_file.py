from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.config import EngineConfig, ServerConfig
from plait.errors import CapacityError, ConfigError
from plait.server.models.catalog import ModelCatalog, ModelEntry
from plait.server.run import run_server
from plait.server.run_models import run_models
from plait.text.chat.jinja import MAX_CHARS
from plait.text.chat.sandbox import Sandbox
from plait.text.chat.template_file import MAX_BYTES, check_template_option, read_template_file


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "neither a readable file nor one of oxidizr, blazr, chatml"),
    "folder": (Path.mkdir, "is no regular file"),
    "pipe": (os.mkfifo, "is no regular file"),
    "large": (make_large, f"has {MAX_BYTES + 1} bytes, and at most {MAX_CHARS} characters are read"),
    "long": (lambda path: path.write_text("x" * (MAX_CHARS + 1)), f"has {MAX_CHARS + 1} characters"),
    "Latin-1": (lambda path: path.write_bytes(b"ab\xe9{{ x }}"), "not text in UTF-8: .* at byte 2"),
    "empty": (lambda path: path.write_text(" \n"), "is empty"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_template_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    make, message = BAD[kind]
    make(path := tmp_path / "chat.jinja")
    with pytest.raises(
        ConfigError, match=f"^chat_template: {re.escape(repr(str(path)))} .*{message}"
    ) as raised:
        read_template_file(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "chat.jinja").write_text("{{ messages }}")

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"neither a readable file .*Permission denied"):
        read_template_file(str(path))


def test_servers_refuse_a_template_that_is_no_jinja_before_they_look_for_a_model(tmp_path: Path) -> None:
    (path := tmp_path / "chat.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    engine, server = EngineConfig(chat_template=str(path)), ServerConfig(port=0)
    message = r"^chat_template: '.*chat.jinja' cannot be used: it is no Jinja: .* \(line 2\)"
    with pytest.raises(ConfigError, match=message):
        run_server("no/such/model", engine, server)
    with pytest.raises(ConfigError, match=message):
        run_models(ModelCatalog([ModelEntry(name="m", source="no/such/model", engine=engine)]), server)


def test_good_files_and_names_of_formats_pass(tmp_path: Path) -> None:
    (path := tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for option in (None, "chatml", str(path)):
        check_template_option(option)


def test_a_machine_that_can_start_no_child_refuses_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "chat.jinja").write_text("{{ messages }}")

    def refuse(self: Sandbox, template: str) -> frozenset[str]:
        raise CapacityError("no process can be started")

    monkeypatch.setattr(Sandbox, "read", refuse)
    check_template_option(str(path))
