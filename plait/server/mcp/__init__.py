"""MCP servers that the operator allows: their list, a client of theirs, and what the page reads of them."""
