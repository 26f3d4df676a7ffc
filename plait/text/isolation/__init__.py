"""Child processes that run code which strangers wrote."""
