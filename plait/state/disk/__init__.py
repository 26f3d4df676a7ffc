"""The prefix cache on disk: files of blocks and snapshots, their index, and the thread that moves them."""
