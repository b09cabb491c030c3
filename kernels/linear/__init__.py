"""Linear -> ReLU -> divide."""
