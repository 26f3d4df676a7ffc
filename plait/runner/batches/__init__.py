"""What a step reads on a device: inputs made for one step, and static buffers that captured steps read."""
