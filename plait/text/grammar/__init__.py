"""Structured output: grammars, tried in a child process, followed token by token."""
