"""Linear -> ReLU -> divide: results, gradients, and the choice of kernels.

test_linear_forward, test_linear_backward, test_properties_linear    results and gradients
test_split, test_split_errors             the arithmetic of float32, on a CPU twin of the kernels
test_promises                             the tools that judge errors of float32
test_tensor_cores                         the twin's tensor cores
test_linear_float32, test_linear_ranges   the arithmetic of float32, on a GPU
test_linear_layouts                       operands stored by rows or by columns
test_linear_one_product                   float32 at `high`
test_linear_paths                         which kernel computes a product, without a GPU
test_linear_chunks, test_linear_schedule  how a product is divided among blocks, without a GPU
"""
