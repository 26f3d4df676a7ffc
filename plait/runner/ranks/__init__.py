"""One model on several ranks: rank 0 plans in the engine's process, each other one is a child process."""
