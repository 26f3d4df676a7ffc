"""From a plan to tokens."""
