"""From files to a runnable engine."""
