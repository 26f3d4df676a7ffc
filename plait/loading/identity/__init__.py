"""What makes two engines equal: hashes of our source code, of a model's files and of its arithmetic."""
