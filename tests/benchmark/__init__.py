"""The package `problems.benchmark`, and pictures.

test_benchmarks           measurements of the modules, and the figures of README and docs
test_benchmark_paths      the times of all kernels that can compute a product
test_benchmark_path_grid  the same for a grid of sizes
test_pictures             pictures of results
"""
