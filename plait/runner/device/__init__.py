"""Steps of a GPU: captured graphs over static buffers, and tickets for their answers."""
