"""`plait bench model`: prefill, decode and batches of a model, next to other engines and revisions."""
