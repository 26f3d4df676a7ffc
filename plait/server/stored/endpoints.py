"""All endpoints of what is stored."""

from __future__ import annotations

from plait.server.stored import batches, chats, conversations, files, responses

STORED = (*responses.ROUTES, *conversations.ROUTES, *chats.ROUTES, *files.ROUTES, *batches.ROUTES)
