"""ReLU: its kernels, its operator, and what the module's forward calls."""
