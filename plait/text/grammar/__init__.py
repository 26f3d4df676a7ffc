"""Structured output: what a reply must look like, and the masks over tokens that hold it to that."""
