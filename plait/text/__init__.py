"""Text to tokens and back. Loads no torch."""
