"""OpenAI's Responses API: items, state, and tools of MCP servers that are called inside a response."""
