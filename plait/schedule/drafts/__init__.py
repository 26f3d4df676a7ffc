"""What drafts and canvases need that imports nothing else of scheduling."""
