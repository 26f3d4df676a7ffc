"""Which sequences run in a step, and the memory they hold. Integers only."""
