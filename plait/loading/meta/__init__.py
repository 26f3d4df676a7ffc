"""A model without its numbers, of tensors that have shapes alone: its states, ops and order of tensors."""
