"""What each op *means*: a plain torch reference, the cases that try it, and the tolerance a variant must meet."""
