"""The kernels as torch and Python see them."""
