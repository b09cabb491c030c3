"""The paths that can compute a product on a GPU, for measurements and tests.

kernels/linear/operator/choose_path.h explains each of them.
"""

# The paths with a kernel of this project. For each one, the compute capability times 10 of the GPUs
# on which choose_path may take it.
KERNEL_PATHS = {"skinny": 90, "sm90": 90, "sm80": 80}
PATHS = [*KERNEL_PATHS, "torch"]

# The capabilities for which `paths` and `path-grid` measure limits. Those of sm80 are estimates.
MEASURED_CAPABILITIES = [90]
