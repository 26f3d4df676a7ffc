"""What the server keeps for clients with `--store`: a SQLite file, rows by API key, retention, encryption."""
