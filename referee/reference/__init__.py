"""The reference: its file, its results and gradients, and inputs for it."""
