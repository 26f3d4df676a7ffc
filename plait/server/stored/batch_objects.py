"""A batch as clients read it, and the form of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from plait.server.openai.batch import Line, read_line
from plait.typed_values import decode_json

WINDOW_S = 86_400
PRIORITY = 1_000  # far behind all clients; half a minute of waiting counts as one level
MAX_LINES = 50_000
MAX_ERRORS = 100  # of a file that is no batch
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class OutputAge(msgspec.Struct, kw_only=True, frozen=True):
    """How long output files are kept, in seconds."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/batches. Without `output_expires_after` files are kept as long as anything else."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: OutputAge | None = None


class BatchFault(msgspec.Struct, kw_only=True, frozen=True):
    """What is wrong with a line of the input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(msgspec.Struct, kw_only=True, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True, frozen=True):
    """A batch. Times are seconds since 1970; null: not yet."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchWork(msgspec.Struct, kw_only=True, frozen=True):
    """What a batch's row holds: the object, and the files that are being written.

    `output_expires_s`: how long these files are kept, if that was requested.
    """

    batch: BatchObject
    output_id: str = ""
    error_id: str = ""
    output_expires_s: int | None = None


def read_request(number: int, text: bytes, endpoint: str) -> Line:
    """One line of the input, as it goes to the application: with low priority, and not stored by itself."""
    line = read_line(number, text)
    if line.fault:
        return line
    if line.url != endpoint:
        fault = f"line {number}: url {line.url!r:.80} is not the batch's endpoint {endpoint!r}"
        return Line(number, line.custom_id, fault=fault)
    body = decode_json(line.body, dict[str, object])
    if body.get("background"):
        return Line(number, line.custom_id, fault=f"line {number}: background: a batch is that; leave it out")
    return Line(number, line.custom_id, line.url, msgspec.json.encode(_lower(body, endpoint)))


def _lower(body: Mapping[str, object], endpoint: str) -> dict[str, object]:
    priority = body.get("priority") or 0
    if type(priority) is int:
        priority = max(priority, PRIORITY)
    more: dict[str, object] = {"store": False} if endpoint == "/v1/responses" and "store" not in body else {}
    return {**body, **more, "priority": priority}
