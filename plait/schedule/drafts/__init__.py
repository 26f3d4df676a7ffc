"""What drafts need that imports nothing else of scheduling: slots for states, and the choice of lengths."""
