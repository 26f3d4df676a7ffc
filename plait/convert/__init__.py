"""Converting a checkpoint: another layout, another storage, or both."""
