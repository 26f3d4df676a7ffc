"""What a conversion writes: which tensors, from which, stored how."""
