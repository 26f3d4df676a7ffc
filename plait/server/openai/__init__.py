"""The OpenAI API: one module per endpoint."""
