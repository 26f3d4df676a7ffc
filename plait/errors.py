"""Every exception a user can meet. A message says what was given, what the limit is, and what to do.

ConfigError has exit code 2, CheckpointError and UnsupportedModel have 3. CapacityError (HTTP 503): not now.
RequestError (400): the client's fault. EngineError (500): our own fault, of one request or of a dead engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Self

MAX_TEXT = 300  # characters of an error's text that clients and logs get


def clip_text(text: object, most: int = MAX_TEXT) -> str:
    """Shorten a text to at most `most` characters, with "…" in place of its middle.

    The middle is left out, because it has what was sent, which may be long. The beginning says what failed
    and where, the end what the limit is or what to do.
    """
    whole = str(text)
    if len(whole) <= most:
        return whole
    head = most * 2 // 3
    return f"{whole[:head]}…{whole[len(whole) - (most - head - 1) :]}"


def list_some(names: Sequence[str], most: int) -> str:
    """The first names, at most `most`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class PlaitError(Exception):
    """Base of all. `status` is the HTTP status, `exit_code` the process's, `code` OpenAI's error code."""

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    code: ClassVar[str | None] = None


class ConfigError(PlaitError):
    """An option, or a combination of options, that cannot be honoured."""

    exit_code = 2


def check_unicode(what: str, value: object) -> None:
    """Refuse a text, or a list of texts, with bytes that are no characters. Raises ConfigError.

    Python has such bytes of a command line, or of a file's name, as surrogates, which no message can carry.
    """
    for text in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
            advice = "write it in UTF-8, or set LC_ALL=C.UTF-8 if it is"
            raise ConfigError(f"{what}: {text!a:.200} has bytes that are not UTF-8 here; {advice}")


class CannotDivide(ConfigError):
    """A model, or a part of it, that cannot be divided among so many ranks. Names the part and its size."""


class PluginError(ConfigError):
    """Code of others that cannot be loaded. Names the plug-in, the error that it raised, and where."""


class CheckpointError(PlaitError):
    """The files of a model."""

    exit_code = 3


class BadFile(CheckpointError):
    """A file that is truncated, lying or unreadable."""


class MissingTensor(CheckpointError):
    """A tensor that the model needs is not there."""


class UnusedTensor(CheckpointError):
    """Nothing reads a tensor: the model would not be the one in the file."""


class ShapeMismatch(CheckpointError):
    """A tensor is there with another shape."""


class UnsupportedFormat(CheckpointError):
    """A container, dtype or quantization that is not read."""


class UnsupportedModel(PlaitError):
    """An architecture, or a key of its config, that is not known."""

    exit_code = 3


class CapacityError(PlaitError):
    """The engine cannot take it now."""

    status = 503
    exit_code = 4


class QueueFull(CapacityError):
    status = 429
    code = "queue_full"


class OutOfBlocks(CapacityError):
    code = "out_of_blocks"


class EngineRestarting(CapacityError):
    """There is no engine for the moment: another takes the place of one that ended."""

    code = "engine_restarting"


class DeadlineExceeded(CapacityError):
    """A request had `timeout_s` seconds and was not done. What it had generated was delivered."""

    status = 504
    code = "deadline_exceeded"


class OutOfMemory(CapacityError):
    """The model or its state does not fit."""

    code = "out_of_memory"


class RequestError(PlaitError):
    """The client's fault. `param` names the field in OpenAI's spelling, like `messages[0].content`."""

    status = 400
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def reword(self, message: str, param: str) -> Self:
        """The same error, for another field."""
        found = copy(self)
        found.args, found.param = (message,), param
        return found


class InvalidField(RequestError):
    code = "invalid_value"


class ContextTooLong(RequestError):
    """`num_prompt_tokens` do not fit into `max_model_len`; None: where it was found, one is not known."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        num_prompt_tokens: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(message, param)
        self.num_prompt_tokens, self.max_model_len = num_prompt_tokens, max_model_len


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class BadTemplate(RequestError):
    """The chat template refused these messages."""

    code = "bad_template"


class BadGrammar(RequestError):
    code = "bad_grammar"


class Cancelled(RequestError):
    status = 499
    code = "cancelled"


class EngineError(PlaitError):
    code = "engine_error"


class EngineClosing(EngineError):
    """The engine closes, as its server stops, and takes no more requests."""

    status = 503
    code = "not_ready"


class EngineKilled(EngineError):
    """A request was in the last step of two engines, once alone, or of four. It is not tried again."""

    code = "engine_killed"


class EngineLost(EngineError):
    """The engine's process ended again and again, and no request is to blame. Nothing can be served."""

    status = 503
    exit_code = 5
    code = "engine_lost"


class KernelFailed(EngineError):
    """A kernel that a GPU cannot compile, or cannot start, for the sizes of a model. Names the kernel."""

    code = "kernel_failed"


class DeviceLost(EngineError):
    """A GPU that failed in a step and answers no more. The engine's process ends, and another replays."""

    code = "device_lost"


class RankLost(DeviceLost):
    """A rank that ended, failed, or computed something else than the others. The engine's process ends."""

    code = "rank_lost"


class CannotRecord(EngineError):
    """A step that must run op by op, and why; reported, never shown as a fault."""
