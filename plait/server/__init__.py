"""HTTP: the OpenAI and Anthropic APIs. Loads no torch."""
