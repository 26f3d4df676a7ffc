"""Child processes that run what strangers wrote."""
