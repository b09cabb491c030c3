"""ReLU."""
