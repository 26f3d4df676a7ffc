"""llama-server's own endpoints: its clients' completion, and facts about the server."""
