"""What a checkpoint holds: from live objects to tensors and values, and back."""
