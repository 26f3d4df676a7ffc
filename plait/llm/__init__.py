"""`plait.LLM`: a model in this process."""
