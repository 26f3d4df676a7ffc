"""The errors of MCP servers, as clients meet them."""

from __future__ import annotations

from typing import Literal

from plait.errors import InvalidField, RequestError

ALLOW = "the operator allows one by --mcp-server LABEL=URL"
FailureKind = Literal["http_error", "mcp_protocol_error"]


class McpNotAllowed(InvalidField):
    """The request names an MCP server that is not on the operator's list."""

    code = "mcp_server_not_allowed"


class McpFailed(RequestError):
    """An MCP server did not answer as one does. `kind` and `number` are OpenAI's, of the error of a call.

    424, because clients retry every 5xx, and a tool must not be called twice.
    """

    status = 424
    code = "mcp_server_failed"

    def __init__(self, message: str, kind: FailureKind = "http_error", number: int = 0) -> None:
        super().__init__(message)
        self.kind, self.number = kind, number


class McpCutOff(McpFailed):
    """The connection ended within an answer."""
