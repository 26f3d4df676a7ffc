"""Where text ends a reply: stop strings, and regular expressions that do."""
