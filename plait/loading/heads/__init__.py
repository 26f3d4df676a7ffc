"""Heads that are not for words: what a model's files say of labels, scores and vectors."""
