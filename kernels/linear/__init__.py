"""Linear -> ReLU -> divide: its kernels, its operators, and what the module's forward calls."""
