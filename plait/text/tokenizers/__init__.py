"""Tokenizers: built in, from GGUF, from tokenizer.json, from SentencePiece."""
