"""The file that `--chat-template` names: read within bounds, and tried before a model is loaded for it."""

from __future__ import annotations

import stat
from pathlib import Path

from plait.errors import BadTemplate, CapacityError, ConfigError
from plait.text.chat.jinja import MAX_CHARS
from plait.text.chat.markers import FORMATS
from plait.text.chat.sandbox import Sandbox

MAX_BYTES = 4 * MAX_CHARS  # UTF-8 has at most four for a character


def read_template_file(option: str) -> str:
    """The Jinja source in it. Raises ConfigError for a file that is missing, no text, too long or empty."""
    path, known = Path(option), ", ".join(FORMATS)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe can be read once only, and a device never ends
            raise ConfigError(f"chat_template: {option!r} is no regular file; name a Jinja file, or {known}")
        if status.st_size > MAX_BYTES:
            text = f"it has {status.st_size} bytes, and at most {MAX_CHARS} characters are read"
            raise ConfigError(f"chat_template: {option!r} is too long: {text}")
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        text = f"{error.reason} at byte {error.start}"
        raise ConfigError(f"chat_template: {option!r} is not text in UTF-8: {text}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template: {option!r} is neither a readable file nor one of {known} ({error})"
        ) from error
    if len(source) > MAX_CHARS:
        text = f"it has {len(source)} characters, and at most {MAX_CHARS} are read"
        raise ConfigError(f"chat_template: {option!r} is too long: {text}")
    if not source.strip():
        raise ConfigError(f"chat_template: {option!r} is empty; name a Jinja file, or {known}")
    return source


def check_template_option(option: str | None) -> None:
    """Raises ConfigError for an option that no model can be served with: loading one may take minutes.

    A child process compiles the template. What depends on the model is found when that is loaded.
    """
    if option is None or option in FORMATS:
        return
    source, sandbox = read_template_file(option), Sandbox()
    try:
        sandbox.read(source)
    except CapacityError:
        pass  # it is read again at the first chat, which reports this
    except BadTemplate as error:
        raise ConfigError(f"chat_template: {option!r} cannot be used: {error}; name another file") from error
    finally:
        sandbox.close()
