"""What the server keeps for clients with `--store`: one SQLite file, rows by API key, retention, encryption."""
