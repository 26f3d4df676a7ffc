"""What each op *means*: a plain torch reference, the cases that try it, the tolerance of variants."""
