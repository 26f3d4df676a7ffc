"""What a step that runs op by op reads, and what every way to run steps has in common."""
